"""Ways to start the agents of a job's hosts, one file each."""
