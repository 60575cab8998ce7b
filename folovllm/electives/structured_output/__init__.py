"""Structured output: a grammar decides on the host which tokens may come next, and a bitmask keeps the sampler to them."""
