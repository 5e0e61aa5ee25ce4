"""The commands of `cheems`, one module each; `cheems_lab.parser` has their options and help."""
