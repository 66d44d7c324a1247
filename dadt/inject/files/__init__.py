"""What the ranks of a host write to the same path: one of them writes it for good."""
