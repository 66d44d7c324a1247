"""Reaching a host by SSH: the route to it, host keys and user keys, and the meaning of its answers."""
