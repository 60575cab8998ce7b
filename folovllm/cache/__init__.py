"""Who owns which part of the KV cache."""

from folovllm.cache.manager import KVCacheManager


def kv_cache_manager(kind: str, prefix_caching: bool = False) -> type[KVCacheManager]:
    """The manager of a kind of cache: "slots" (contiguous) or "paged", the latter with or without reuse of prefixes."""
    if kind == "slots":
        from folovllm.cache.slot_manager import SlotManager

        return SlotManager
    if prefix_caching:
        from folovllm.cache.prefix_cache import PrefixCachingBlockManager

        return PrefixCachingBlockManager
    from folovllm.cache.block_manager import BlockManager

    return BlockManager
