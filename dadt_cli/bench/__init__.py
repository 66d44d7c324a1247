"""`dadt bench`. Each benchmark is one file; ratios are taken side by side in one run."""
