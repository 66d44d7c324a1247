"""`--algorithm auto`: measures the first, synchronous steps and then chooses the fastest algorithm and compression."""
