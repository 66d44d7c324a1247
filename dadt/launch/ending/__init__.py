"""Decides how and when a job ends, and finds the cause of a failure."""
