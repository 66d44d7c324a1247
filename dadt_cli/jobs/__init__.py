"""Commands on running and finished jobs."""
