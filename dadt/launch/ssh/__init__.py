"""Connects to hosts by SSH: the route to a host, host keys and user keys, and the meaning of errors."""
