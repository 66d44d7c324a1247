"""The launcher's knowledge of each rank (progress, output, waits), and what it feeds: console, journal, series and
metrics."""
