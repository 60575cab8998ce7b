"""Benchmarks: each module has a function that measures and one that prints."""
