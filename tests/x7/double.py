"""A connector that is no elective: K/V of evicted blocks in a dict, which come back after some steps, or never."""

from __future__ import annotations

from typing import Any

import torch

from folovllm.cache.block_manager import Block
from folovllm.cache.connector import KVConnector
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.executor.abstract import Executor
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput

Saved = dict[int, tuple[torch.Tensor, bytes]]


def cache_of(worker: Any) -> torch.Tensor:
    """A worker's cache, [L, 2, N, Hkv, B, D]."""
    cache: torch.Tensor = getattr(worker.runner, "inner", worker.runner).kv_cache
    return cache


class DictConnector(KVConnector):
    """`delay`: steps that a load takes. `broken`: how many blocks of each load do not come."""

    delay, broken = 2, 0

    def __init__(self, setup: Any, executor: Executor, kv: PrefixCachingBlockManager) -> None:
        self.kv, self.saved, self.loads = kv, Saved(), dict[int, tuple[int, Sequence, list[int]]]()
        (self.cache,) = executor.collective_rpc(cache_of)
        self.steps = self.num_loaded = 0
        self.evicted: list[tuple[int, int, bytes]] = []

    def block_evicted(self, block: Block) -> None:
        assert block.hash is not None
        self.evicted.append((block.block_id, block.hash, block.token_ids))

    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int | None:
        size, cache, count = self.kv.block_size, self.kv.prefix_cache, 0
        for i in range(num_computed_tokens // size, (seq.num_tokens - 1) // size):
            saved = self.saved.get(cache._hash(seq, i))
            if saved is None or saved[1] != cache._tokens(seq, i):
                break
            count += 1
        return count * size

    def update_state_after_alloc(self, seq: Sequence, block_ids: list[int], num_external_tokens: int) -> None:
        assert len(block_ids) * self.kv.block_size == num_external_tokens
        self.loads[seq.seq_id] = self.steps + self.delay, seq, list(block_ids)

    def build_connector_meta(self, output: SchedulerOutput) -> None:
        for block_id, hash_, token_ids in self.evicted:
            self.saved[hash_] = self.cache[:, :, block_id].clone(), token_ids
        self.evicted.clear()
        self.steps += 1

    def get_finished(self) -> dict[int, int]:
        done = {seq_id: load for seq_id, load in self.loads.items() if load[0] <= self.steps}
        size = self.kv.block_size
        for seq_id, (_, seq, block_ids) in done.items():
            del self.loads[seq_id]
            del block_ids[len(block_ids) - self.broken :]
            first = seq.num_computed_tokens // size
            for i, block_id in enumerate(block_ids, first):
                self.cache[:, :, block_id] = self.saved[self.kv.prefix_cache._hash(seq, i)][0]
            self.num_loaded += len(block_ids)
        return {seq_id: len(block_ids) * size for seq_id, (_, _, block_ids) in done.items()}

    def request_finished(self, seq: Sequence, block_ids: list[int]) -> None:
        self.loads.pop(seq.seq_id, None)

    def reset(self) -> None:
        self.saved.clear()
        self.evicted.clear()
