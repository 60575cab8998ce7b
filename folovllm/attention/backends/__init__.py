"""Attention backends, registered lazily by name."""
