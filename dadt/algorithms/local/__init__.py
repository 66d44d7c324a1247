"""Local SGD, in which each rank trains alone and weights are averaged once in many steps."""
