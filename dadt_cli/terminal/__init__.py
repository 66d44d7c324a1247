"""Output to the terminal and to files."""
