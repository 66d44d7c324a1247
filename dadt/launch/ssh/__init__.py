"""What it takes to get to a host by SSH: the way to it, its key, ours, and what its answers mean."""
