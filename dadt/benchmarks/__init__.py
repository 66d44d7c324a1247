"""What `dadt bench` measures: each benchmark is one file. Ratios are taken side by side in one run."""
