"""What a script calls: init, collectives, messages, DistributedOptimizer, run."""
