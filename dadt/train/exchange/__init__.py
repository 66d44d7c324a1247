"""Exchanges: averages of gradients and buffers over ranks, and the metadata that ranks compare along with them."""
