"""The commands of `cheems`, one module each: its help, its options, and what it does."""
