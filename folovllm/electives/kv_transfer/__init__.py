"""X7: K/V that move, to host memory, to a disk, and from one engine to another."""
