"""From a plan to the order to start the workers."""
