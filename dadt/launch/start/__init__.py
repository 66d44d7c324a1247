"""Prepares a planned job for the start of its workers: collects the hosts' reports, chooses addresses, places the
workers, and builds the orders to the agents."""
