"""DataLoaders: shares, feeds, random streams."""
