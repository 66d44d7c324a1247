"""DADT's handling of a script's DataLoaders: each rank's share of the data, the iterators that the script gets, and
random number streams."""
