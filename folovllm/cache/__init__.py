"""Who owns which part of the KV cache."""

from folovllm.cache.block_manager import BlockManager
from folovllm.cache.manager import KVCacheManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.cache.slot_manager import SlotManager


def kv_cache_manager(kind: str, prefix_caching: bool = False) -> type[KVCacheManager]:
    """The manager of a kind of cache: "slots" (contiguous) or "paged", the latter with or without reuse of prefixes."""
    if kind == "slots":
        return SlotManager
    return PrefixCachingBlockManager if prefix_caching else BlockManager
