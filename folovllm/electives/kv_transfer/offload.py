"""Offloading: what the prefix cache evicts is kept in host memory, and on disk if asked."""

from __future__ import annotations

from folovllm.cache.connector import KVConnector


class OffloadConnector(KVConnector):
    """Under way."""
