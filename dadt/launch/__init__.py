"""Starts a distributed job: places workers on hosts, starts one agent per host, collects the workers' output, and
cleans up when the job ends."""
