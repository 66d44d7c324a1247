"""Who is in a running job, and what its ranks do at the launcher."""
