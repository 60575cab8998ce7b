"""Triton kernels whose result for a token does not depend on the batch that it is in."""
