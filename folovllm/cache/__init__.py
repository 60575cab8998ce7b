"""Owners of the KV cache: they know which sequence holds which part of it."""
