"""One averaging of gradients and buffers, and what ranks agree on beside it."""
