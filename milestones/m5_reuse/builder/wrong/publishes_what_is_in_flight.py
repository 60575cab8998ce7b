"""A block is named when its tokens are computed, though the host does not know the last one yet: it has the name of another."""

from __future__ import annotations

from folovllm.learn.builders.reference import PrefixCache as Right
from folovllm.request import Sequence


class PrefixCache(Right):
    def cache_blocks(self, seq: Sequence) -> None:
        known, seq.num_tokens = seq.num_tokens, max(seq.num_tokens, seq.num_computed_tokens)
        try:
            super().cache_blocks(seq)
        finally:
            seq.num_tokens = known
