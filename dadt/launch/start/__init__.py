"""Prepares a planned job for the start of its workers: hosts' reports, addresses, placement and orders to agents."""
