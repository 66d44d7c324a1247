"""What Horovod's frontends have in common."""
