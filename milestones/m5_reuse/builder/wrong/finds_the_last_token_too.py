"""All full blocks count, the last one too: of a prompt that is cached whole nothing is left to compute, and no logits come."""

from __future__ import annotations

from folovllm.learn.builders.reference import PrefixCache as Right
from folovllm.request import Sequence


class PrefixCache(Right):
    def get_computed_blocks(self, seq: Sequence) -> None:
        seq.num_tokens += 1
        try:
            super().get_computed_blocks(seq)
        finally:
            seq.num_tokens -= 1
