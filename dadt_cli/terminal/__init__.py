"""What goes to the terminal and to files."""
