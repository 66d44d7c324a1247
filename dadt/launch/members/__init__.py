"""Membership of a running job's ranks and hosts, and what ranks exchange through the launcher."""
