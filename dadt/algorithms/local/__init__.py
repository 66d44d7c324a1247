"""Local SGD: weights are averaged once in many steps."""
