"""Sequences without a tokenizer, and a cache that only counts: what tests of schedulers and caches need."""

from typing import Any

import numpy as np
import numpy.typing as npt

from folovllm.cache.block_manager import BlockManager
from folovllm.cache.manager import KVCacheManager
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams

EOS = 99


def make_seq(
    prompt: int | list[int] = 3, max_tokens: int = 8, name: str = "r", priority: int = 0, salt: str | None = None,
    **params: Any,
) -> Sequence:  # fmt: skip
    """A waiting sequence that ends at the token `EOS` or after `max_tokens`. A prompt of n tokens is 10, 11, 12, ..."""
    request = Request(
        request_id=name, prompt_token_ids=[10 + i for i in range(prompt)] if isinstance(prompt, int) else prompt,
        params=SamplingParams(max_tokens=max_tokens, **params), max_tokens=max_tokens, seed=0,
        eos_token_ids=frozenset({EOS}), priority=priority, cache_salt=salt,
    )  # fmt: skip
    return Sequence(request, IncrementalDetokenizer(lambda ids: "".join(f"<{i}>" for i in ids)))


def holding(kv: BlockManager, *block_ids: int, computed: int = 0, tokens: int = 1) -> Sequence:
    """A running sequence whose table names these blocks; they leave the free list, or gain one more holder."""
    seq = make_seq(max(computed, tokens))
    seq.start()
    seq.num_computed_tokens = computed
    for block_id in block_ids:
        block = kv.blocks[block_id]
        if block.ref_count == 0:
            kv._free.remove(block)
        block.ref_count += 1
    seq.block_table = list(block_ids)
    return seq


def free_ids(kv: BlockManager) -> list[int]:
    """The free list from left to right, by taking all of it."""
    return [kv._free.popleft().block_id for _ in range(kv.num_free)]


class CountingCache(KVCacheManager):
    """Room for `num_tokens` tokens, wherever they are; notes who asked for what in `calls`."""

    def __init__(self, num_tokens: int = 10_000) -> None:
        super().__init__(num_tokens, 1)
        self.held: dict[Sequence, int] = {}
        self.cached: dict[str, int] = {}  # request id -> tokens that `get_computed_blocks` finds
        self.calls: list[tuple[str, str]] = []

    def get_computed_blocks(self, seq: Sequence) -> None:
        self.calls.append(("get_computed_blocks", seq.request_id))
        seq.num_computed_tokens = self.held[seq] = self.cached.get(seq.request_id, 0)

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        self.calls.append(("allocate_slots", seq.request_id))
        missing = seq.num_computed_tokens + num_new_tokens - self.held.get(seq, 0)
        if missing > self.num_free:
            return False
        self.held[seq] = self.held.get(seq, 0) + missing
        return True

    def cache_blocks(self, seq: Sequence) -> None:
        self.calls.append(("cache_blocks", f"{seq.request_id} with {seq.num_tokens} tokens"))

    def free(self, seq: Sequence) -> None:
        self.calls.append(("free", seq.request_id))
        self.held.pop(seq, None)

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(self.held.values())

    @staticmethod
    def slots(block_table: list[int], block_size: int, start: int, end: int) -> npt.NDArray[np.int64]:
        return np.array([1000 * block_table[0] + position for position in range(start, end)])
