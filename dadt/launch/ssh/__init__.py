"""Connects to hosts by SSH: finds the route to a host, handles host keys and user keys, and explains errors."""
