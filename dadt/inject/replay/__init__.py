"""Snapshots of an unmodified script, and going on from one: the script runs again, without what is expensive."""
