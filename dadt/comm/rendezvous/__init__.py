"""How ranks that another launcher has started find each other: a key-value store."""
