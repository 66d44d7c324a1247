"""What speaks the language of another library: a folder for each, on the operations of dadt.api."""
