"""Tracks which ranks and hosts are in a running job, and passes on what ranks exchange through the launcher."""
