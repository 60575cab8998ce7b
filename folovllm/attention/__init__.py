"""Attention: the operations, and the backends that compute them."""
