"""Measures, and then goes on with what is fastest."""
