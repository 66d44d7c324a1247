"""The functions that a script calls: init, collectives, messages, DistributedOptimizer, run."""
