"""Hybrid models (X5): layers of gated linear attention, whose state has a fixed size, among layers of full attention."""
