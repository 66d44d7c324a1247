"""Exchanges, each of which averages gradients and buffers over ranks and carries metadata that ranks compare."""
