"""Terminal output, files of settings and command-line options."""
