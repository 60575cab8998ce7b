"""Who owns which part of the KV cache."""

from folovllm.cache.manager import KVCacheManager


def kv_cache_manager(kind: str) -> type[KVCacheManager]:
    """The manager of a kind of cache: "slots" (contiguous) or "paged"."""
    if kind == "slots":
        from folovllm.cache.slot_manager import SlotManager

        return SlotManager
    from folovllm.cache.block_manager import BlockManager

    return BlockManager
