"""Generations of weights: K/V that older weights computed must not be found again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import xxhash

from folovllm.cache.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine


def generation_root(salt: int, generation: int) -> int:
    """Return the hash that stands before a first block: every block's hash follows from it (`compute_hash`).

    Of generation 0 it is the hash of the tenant's salt alone, as without generations. Each later generation has roots of its
    own, which differ between salts as well: `xxhash.xxh64` over the 8 bytes of `generation`, then the 8 bytes of `salt`, both
    little endian.

    Args:
        salt: the hash of the tenant's salt, 0 without one. generation: how often the weights have changed.

    Returns:
        64 bits, unsigned.
    """
    if generation == 0:
        return salt
    return xxhash.xxh64_intdigest(generation.to_bytes(8, "little") + salt.to_bytes(8, "little"))


class Generation:
    """Replaces `PrefixCache.root`: returns the root hash for a salt in the current generation."""

    def __init__(self, salted: Callable[[str | None], int]) -> None:
        self._salted = salted
        self.number = 0

    def __call__(self, salt: str | None) -> int:
        return generation_root(self._salted(salt), self.number)


def next_generation(engine: LLMEngine) -> None:
    """Make what is cached unfindable for later requests. Blocks lose their hashes when they are used for something else.

    Waiting sequences begin anew, with the new root. A running one keeps the root that it began with, even if it has no full
    block yet: its K/V are of both generations, and no later request must find them.
    """
    cache = cast(PrefixCache | None, getattr(engine.scheduler.kv, "prefix_cache", None))
    if cache is None:
        return
    if not isinstance(cache.root, Generation):
        cache.root = Generation(cache.root)
    for seq in engine.scheduler.running:
        cache.root_of(seq)
    cache.root.number += 1
    for seq in engine.scheduler.waiting:
        if seq.prefix is not None:
            seq.prefix.root = None
            seq.prefix.hashes.clear()
            seq.prefix.tokens.clear()
