"""What is too long to run live: how each record came about, and the records."""
