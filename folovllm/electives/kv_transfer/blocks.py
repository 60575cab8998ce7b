"""K/V of a prompt out of an engine's cache, and into another's: what a server calls beside its engine, between two steps.

Blocks that come from elsewhere become cached blocks that no sequence holds. The request that they are for is then queued like
any other, and finds them as a prefix (M5): so its text is that of a prefix hit. No call leaves a block held, so a transfer
can neither fill the cache for good nor let others wait. If the blocks are needed for something else before the request is
admitted, it computes them.
"""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import xxhash

from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.electives.kv_transfer.digest import model_digest
from folovllm.electives.kv_transfer.rank_cache import cache_of, move, on_device, runner_of
from folovllm.electives.kv_transfer.segment import MOST_MAPPED, open_segment
from folovllm.electives.kv_transfer.wire import Ask, Layout, SegmentRef
from folovllm.engine.events import BlocksMoved
from folovllm.layers.attention import attention_layers
from folovllm.models.model_config import num_linear_of
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine

_layouts: weakref.WeakKeyDictionary[LLMEngine, Layout] = weakref.WeakKeyDictionary()


def look_up(engine: LLMEngine, query: dict[str, Any]) -> bytes:
    """The engine's `Layout`, and how many blocks of a prompt (`token_ids`, `salt`) are cached; encoded.

    Raises ValueError if the engine's K/V cannot travel.
    """
    seq = _sequence(query["token_ids"], query["salt"])
    return msgspec.msgpack.encode((_layout(engine), len(_manager(engine).prefix_cache.longest_cached_prefix(seq))))


def export_blocks(engine: LLMEngine, query: dict[str, Any]) -> int:
    """Copy blocks from the cache to memory (`blocks`: an `Ask`, the first, the end, and a `SegmentRef`), as many as are there. Returns how many.

    Raises ValueError if the engine's layout is another by now (its weights have changed), or it sleeps, or the memory is gone.
    """
    ask, first, end, memory, kv = _asked(engine, query)
    found = kv.prefix_cache.longest_cached_prefix(_sequence(ask.tokens(0, end), ask.salt))[first:]
    if found:
        _copy(engine, ask, memory, [block.block_id for block in found], 0, len(found), to_cache=False)
        _report(kv, "offloaded", len(found), ask)
    return len(found)


def import_blocks(engine: LLMEngine, query: dict[str, Any]) -> int:
    """Copy blocks from memory to the cache, where requests find them. Takes and raises what `export_blocks` does.

    Returns:
        The number of blocks that the prompt has in the cache now; fewer than `end` if there is no room.
    """
    ask, first, end, memory, kv = _asked(engine, query)
    seq = _sequence(ask.tokens(0, end), ask.salt)
    try:
        kv.get_computed_blocks(seq)
        have = len(seq.block_table)
        missing = (end - have) * kv.block_size
        if have < first or missing <= 0 or not kv.can_allocate(seq, missing):
            return have
        kv.allocate(seq, missing)
        if kv.connector is not None:
            kv.connector.build_connector_meta(SchedulerOutput())  # it saves first what these blocks held
        _copy(engine, ask, memory, seq.block_table[have:], have - first, end - first, to_cache=True)
        seq.num_computed_tokens = end * kv.block_size
        kv.cache_blocks(seq)
        _report(kv, "loaded", end - have, ask)
        return end
    finally:
        kv.free(seq)


def _asked(engine: LLMEngine, query: dict[str, Any]) -> tuple[Ask, int, int, SegmentRef, PrefixCachingBlockManager]:
    """What a call is about, and the owner of the cache."""
    ask, first, end, memory = msgspec.msgpack.decode(query["blocks"], type=tuple[Ask, int, int, SegmentRef])
    _layout(engine).require_same(ask.layout)
    if engine.refusal:
        raise ValueError(engine.refusal)
    return ask, first, end, memory, _manager(engine)


def _sequence(token_ids: bytes, salt: str | None) -> Sequence:
    """A sequence that is never scheduled: it begins with these tokens, whose last block may be cached, since one more follows."""
    tokens = [*np.frombuffer(token_ids, np.int32).tolist(), 0]
    return Sequence(Request("", tokens, SamplingParams(), max_tokens=1, seed=0, cache_salt=salt), cast(Any, None))


def _manager(engine: LLMEngine) -> PrefixCachingBlockManager:
    kv = engine.scheduler.kv
    if not isinstance(kv, PrefixCachingBlockManager):
        raise ValueError("--role needs a cache of prefixes: leave --milestone out, or say --enable-prefix-caching")
    if num_linear_of(engine.setup.hf_config):
        raise ValueError("--role: layers of this model keep states, which do not travel. Serve it with one engine")
    return kv


def _layout(engine: LLMEngine) -> Layout:
    """The layout of the cache. What the ranks say is kept until the weights change."""
    kv, setup = _manager(engine), engine.setup
    weights = int(getattr(kv.prefix_cache.root, "number", 0))
    if (known := _layouts.get(engine)) is None or known.weights != weights:
        facts = engine.executor.collective_rpc(cache_facts)
        scales, (_, dtype, shape) = "".join(each[0] for each in facts), facts[0]
        # What weights were changed to has no name that another process knows, so their K/V stay here.
        model = os.urandom(16) if weights else model_digest(setup, by_time=False)
        known = _layouts[engine] = Layout(weights, model, dtype, scales, kv.block_size, shape, len(facts))
    return known


def _report(kv: PrefixCachingBlockManager, what: str, count: int, ask: Ask) -> None:
    if kv.events.on:
        kv.events.emit(BlocksMoved(what, "peer", count, count * ask.layout.block_bytes, -1))


def _copy(
    engine: LLMEngine, ask: Ask, memory: SegmentRef, ids: list[int], skip: int, count: int, *, to_cache: bool
) -> None:
    ref = msgspec.structs.astuple(memory)
    engine.executor.collective_rpc(copy_blocks, ref, ask.layout.ranks, ids, skip, count, to_cache)


# --- on each rank ------------------------------------------------------------------------------------------------------


def cache_facts(worker: Any) -> tuple[str, str, tuple[int, ...]]:
    """What a rank knows of its cache: a digest of the scales of 8 bits, the dtype, and the shape of a block (`Layout.shape`)."""
    runner, digest = runner_of(worker), xxhash.xxh3_64()
    layers, two, _, heads, size, numbers = runner.kv_cache.shape
    width = runner.kv_cache.element_size()
    for layer in attention_layers(runner.model) if width == 1 else ():
        offset = layer.scales.offset
        digest.update(repr((layer.scales.key, layer.scales.value, offset is None)).encode())
        digest.update(b"" if offset is None else offset.float().cpu().numpy().tobytes())
    dtype = str(runner.kv_cache.dtype).removeprefix("torch.")
    return digest.hexdigest() if width == 1 else "", dtype, (layers, two, heads, size, numbers * width)


def copy_blocks(
    worker: Any, memory: tuple[str, bytes], ranks: int, ids: list[int], skip: int, count: int, to_cache: bool
) -> None:
    """Copy blocks between the rank's cache and its part of shared memory, which holds `count`, from number `skip` on.

    It returns when the memory has been read or written. What comes is read beside the step that runs; the copy within the device has its
    turn among the steps.
    """
    with worker.current, torch.inference_mode():
        cache = cache_of(worker)
        pieces, _, words = cache.shape
        shared, num_words = mapped(SegmentRef(*memory), cache.is_cuda), ranks * count * pieces * words
        if num_words > len(shared):
            raise ValueError(f"{count} blocks do not fit into shared memory of {4 * len(shared)} bytes")
        rank = dist.get_rank() if ranks > 1 else 0
        lines = shared[:num_words].view(ranks, count, pieces, words)[rank, skip : skip + len(ids)]
        block_ids = on_device(ids, cache.device)
        if not to_cache:
            gathered = torch.empty_like(lines, device=cache.device)
            move(cache, gathered, block_ids, to_cache=False)
            lines.copy_(gathered)
            return
        stream = torch.cuda.Stream() if cache.is_cuda else None
        with torch.cuda.stream(stream):
            come = lines.to(cache.device)
        if stream is not None:
            come.record_stream(torch.cuda.current_stream())
        move(cache, come, block_ids, to_cache=True)


@lru_cache(MOST_MAPPED)
def mapped(ref: SegmentRef, is_cuda: bool) -> torch.Tensor:
    """A segment [words]. It stays mapped, and pinned where there is a GPU (which takes long), until many others have come."""
    memory = torch.frombuffer(open_segment(ref), dtype=torch.int32)
    if is_cuda:  # what cannot be pinned is copied in the slower way
        cudart = torch.cuda.cudart()
        cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
    return memory
