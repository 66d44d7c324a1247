"""Helpers from Horovod's launcher that scripts use."""
