"""Records what the launcher learns about each rank (progress, output, waits), and writes it to the console, the
journal, `progress.jsonl` and exported metrics."""
