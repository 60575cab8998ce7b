"""K/V of a prompt out of an engine's cache, and into another's: what a server calls beside its engine, between two steps.

Blocks that come from elsewhere become cached blocks that no sequence holds. The request that they are for is then queued like
any other, and finds them as a prefix (M5): so its text is that of a prefix hit. No call leaves a block held, so a transfer
can neither fill the cache for good nor let others wait. If the blocks are needed for something else before the request is
admitted, it computes them.

A query has a prompt's `token_ids` (int32 as bytes, whole blocks) and `salt`. To copy blocks it has, besides, the number of the `first` one
and the `memory` (`SegmentRef`) that holds them all, from this one to the last. Each call raises ValueError if K/V of this engine cannot travel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.electives.kv_transfer.digest import kv_dtype, model_digest
from folovllm.electives.kv_transfer.rank_cache import block_bytes_of, cache_of, move, on_device, pin, rank_of
from folovllm.electives.kv_transfer.segment import MOST_MAPPED, open_segment
from folovllm.electives.kv_transfer.wire import SegmentRef
from folovllm.engine.events import BlocksMoved
from folovllm.models.model_config import num_linear_of
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine


def get_layout(engine: LLMEngine, query: dict[str, Any]) -> tuple[bytes, str, int, int, int]:
    """The fields of the engine's `Layout`. The query is empty."""
    cache_manager(engine)
    setup, sizes = engine.setup, engine.executor.collective_rpc(block_bytes_of)
    return model_digest(setup, by_time=False), kv_dtype(setup), setup.block_size, len(sizes), sum(sizes)


def get_computed_blocks(engine: LLMEngine, query: dict[str, Any]) -> int:
    """How many blocks of a prompt are cached."""
    return len(cache_manager(engine).prefix_cache.longest_cached_prefix(prompt_sequence(**query)))


def export_blocks(engine: LLMEngine, query: dict[str, Any]) -> int:
    """Copy blocks from the cache to memory, as many as are there. Returns how many."""
    kv, seq = cache_manager(engine), prompt_sequence(**query)
    found = kv.prefix_cache.longest_cached_prefix(seq)[query["first"] :]
    move_blocks(engine, query, [block.block_id for block in found], 0, len(found), to_cache=False)
    return len(found)


def import_blocks(engine: LLMEngine, query: dict[str, Any]) -> int:
    """Copy blocks from memory to the cache, where requests find them.

    Returns:
        The number of blocks that the prompt has in the cache now; fewer than it has if there is no room.
    """
    kv, seq, first = cache_manager(engine), prompt_sequence(**query), query["first"]
    end = seq.num_tokens // kv.block_size
    try:
        kv.get_computed_blocks(seq)
        num_cached = len(seq.block_table)
        missing = (end - num_cached) * kv.block_size
        if num_cached < first or missing <= 0 or not kv.can_allocate(seq, missing):
            return num_cached
        kv.allocate(seq, missing)
        if kv.connector is not None:
            kv.connector.build_connector_meta(SchedulerOutput())  # it saves first what these blocks held
        move_blocks(engine, query, seq.block_table[num_cached:], num_cached - first, end - first, to_cache=True)
        seq.num_computed_tokens = end * kv.block_size
        kv.cache_blocks(seq)
        return end
    finally:
        kv.free(seq)


def prompt_sequence(token_ids: bytes, salt: str | None, **_: Any) -> Sequence:
    """A sequence that is never scheduled: it begins with these tokens, whose last block may be cached, since one more follows."""
    tokens = [*np.frombuffer(token_ids, np.int32).tolist(), 0]
    return Sequence(Request("", tokens, SamplingParams(), max_tokens=1, seed=0, cache_salt=salt), cast(Any, None))


def cache_manager(engine: LLMEngine) -> PrefixCachingBlockManager:
    """The owner of the engine's blocks. Raises ValueError if what is in them cannot travel."""
    kv, setup = engine.scheduler.kv, engine.setup
    if not isinstance(kv, PrefixCachingBlockManager):
        raise ValueError("--role needs a cache of prefixes: leave --milestone out, or say --enable-prefix-caching")
    for is_so, sentence in (
        (num_linear_of(setup.hf_config), "--role: layers of this model keep states, which do not travel. Serve it with one engine"),
        ("calculate_kv_scales" in setup.config.extras, "--role: each engine measures scales of its own, so their K/V differ: leave calculate_kv_scales out"),
        (getattr(kv.prefix_cache.root, "number", 0), "the weights were updated, which gives them no name that a peer knows: their K/V stay here"),
        (engine.refusal, engine.refusal),
    ):  # fmt: skip
        if is_so:
            raise ValueError(sentence)
    return kv


def move_blocks(
    engine: LLMEngine, query: dict[str, Any], ids: list[int], skip: int, count: int, *, to_cache: bool
) -> None:
    """Copy blocks `ids` between each rank's cache and the shared memory of `query`, for `count` blocks, `skip` of which come before."""
    if not ids:
        return
    ranks, events = engine.setup.config.tensor_parallel_size, cache_manager(engine).events
    moved = engine.executor.collective_rpc(copy_blocks, query["memory"], ranks, ids, skip, count, to_cache)
    if events.on:
        events.emit(BlocksMoved("loaded" if to_cache else "offloaded", "peer", len(ids), sum(moved), -1))


# --- on each rank ------------------------------------------------------------------------------------------------------


def copy_blocks(
    worker: Any, memory: list[Any], ranks: int, ids: list[int], skip: int, count: int, to_cache: bool
) -> int:
    """Copy blocks between the rank's cache and its part of shared memory, which holds `count`, from number `skip` on. Returns their bytes.

    It returns when the memory has been read or written. What comes is read beside the step that runs; the copy within the device has its
    turn among the steps.
    """
    with worker.current, torch.inference_mode():
        cache = cache_of(worker)
        pieces, _, words = cache.shape
        parts = mapped(SegmentRef(*memory), cache.is_cuda)[: ranks * count * pieces * words]
        lines = parts.view(ranks, count, pieces, words)[rank_of(ranks), skip : skip + len(ids)]
        with torch.cuda.stream(torch.cuda.Stream() if to_cache and cache.is_cuda else None):
            there = lines.to(cache.device) if to_cache else torch.empty_like(lines, device=cache.device)
        if to_cache and cache.is_cuda:
            there.record_stream(torch.cuda.current_stream())
        move(cache, there, on_device(ids, cache.device), to_cache=to_cache)
        if not to_cache:
            lines.copy_(there)
        return lines.nbytes


@lru_cache(MOST_MAPPED)
def mapped(ref: SegmentRef, is_cuda: bool) -> torch.Tensor:
    """Return a segment, int32 [words], pinned for a GPU. It stays mapped until many others come. ValueError: it is gone."""
    if (data := open_segment(ref)) is None:
        raise ValueError("the shared memory of K/V is gone")
    memory = torch.frombuffer(data, dtype=torch.int32)
    if is_cuda:
        pin(memory, memory)  # what cannot be pinned is copied in the slower way
    return memory
