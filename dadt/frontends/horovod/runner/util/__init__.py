"""What scripts for Horovod use of its launcher."""
