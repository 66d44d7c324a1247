"""What is known of each rank, and who is told: output, journal, series, metrics."""
