"""The launcher's records of each rank (progress, output, waits), and what is written from them: console, journal,
series and metrics."""
