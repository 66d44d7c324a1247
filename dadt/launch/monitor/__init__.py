"""The launcher's knowledge of each rank, and its readers: output, journal, series, metrics."""
