"""K/V of a prompt out of an engine's cache, and into another's: what a server calls beside its engine, between two steps.

Blocks that come from elsewhere become cached blocks that no sequence holds. The request that they are for is then queued like
any other, and finds them as a prefix (M5): so its text is that of a prefix hit. No call leaves a block held, so a transfer
can neither fill the cache for good nor let others wait. If the blocks are needed for something else before the request is
admitted, it computes them.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
import xxhash

from folovllm.cache.prefix_cache import PrefixCachingBlockManager, compute_hash
from folovllm.electives.kv_transfer.digest import model_digest
from folovllm.electives.kv_transfer.segment import START, open_segment
from folovllm.electives.kv_transfer.wire import Layout, SegmentRef, WireError
from folovllm.engine.events import BlocksMoved
from folovllm.layers.attention import attention_layers
from folovllm.models.model_config import num_linear_of
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine

MOST_MAPPED = 16  # segments that a worker keeps mapped
COPIED = 32 << 20  # bytes that one copy moves at most: they need room on the device, beside the cache
Worker = GPUWorker[Any, Any]
_layouts: weakref.WeakKeyDictionary[LLMEngine, Layout] = weakref.WeakKeyDictionary()


class Blocks(msgspec.Struct, array_like=True, frozen=True):
    """Blocks `first` to `end - 1` of a prompt, whose K/V lie in memory. A server hands this to its engine, encoded."""

    token_ids: bytes  # from the beginning of the prompt, int32
    salt: str | None
    first: int
    end: int
    until: int  # those in front of this number are to be copied now
    memory: SegmentRef
    layout: Layout


def look_up(engine: LLMEngine, query: dict[str, Any]) -> bytes:
    """The engine's `Layout`, how many blocks of a prompt (`token_ids`, `salt`) are cached, and the hash before its first one; encoded.

    Raises ValueError if the engine's K/V cannot travel.
    """
    cache, seq = _manager(engine).prefix_cache, _sequence(query["token_ids"], query["salt"])
    return msgspec.msgpack.encode((_layout(engine), len(cache.longest_cached_prefix(seq)), cache.root_of(seq)))


def export_blocks(engine: LLMEngine, query: dict[str, Any]) -> list[int | None]:
    """Copy `Blocks` from the cache to their memory, as many as are there. Returns the key of each.

    Raises ValueError if the engine's layout is another by now (its weights have changed), or it sleeps, or the memory is gone.
    """
    asked, kv, seq = _asked(engine, query)
    found = kv.prefix_cache.longest_cached_prefix(seq)[asked.first :]
    if found:
        _on_workers(engine, read_blocks, asked, [block.block_id for block in found], 0, len(found))
        _report(kv, "offloaded", len(found), asked)
    return [block.hash for block in found]


def import_blocks(engine: LLMEngine, query: dict[str, Any]) -> int:
    """Copy `Blocks` from their memory to the cache, where requests find them. Raises what `export_blocks` raises.

    Returns:
        The number of blocks that the prompt has in the cache now; fewer than `until` if there is no room.
    """
    asked, kv, seq = _asked(engine, query)
    try:
        kv.get_computed_blocks(seq)
        have = len(seq.block_table)
        missing = (asked.until - have) * kv.block_size
        if have < asked.first or missing <= 0 or not kv.can_allocate(seq, missing):
            return have
        kv.allocate(seq, missing)
        if kv.connector is not None:
            kv.connector.build_connector_meta(SchedulerOutput())  # it saves first what these blocks held
        _on_workers(engine, write_blocks, asked, seq.block_table[have:], have - asked.first, asked.end - asked.first)
        seq.num_computed_tokens = asked.until * kv.block_size
        kv.cache_blocks(seq)
        _report(kv, "loaded", asked.until - have, asked)
        return asked.until
    finally:
        kv.free(seq)


def block_keys(token_ids: bytes, block_size: int, root: int) -> list[int]:
    """The chained hash of each block of a prompt, behind the hash `root`."""
    keys = [root]
    for block in np.frombuffer(token_ids, np.int32).reshape(-1, block_size):
        keys.append(compute_hash(block, keys[-1]))
    return keys[1:]


def _asked(engine: LLMEngine, query: dict[str, Any]) -> tuple[Blocks, PrefixCachingBlockManager, Sequence]:
    """What a call is about, the owner of the cache, and a sequence that has these tokens."""
    asked, kv = msgspec.msgpack.decode(query["blocks"], type=Blocks), _manager(engine)
    _layout(engine).require_same(asked.layout)
    if engine.refusal:
        raise ValueError(engine.refusal)
    return asked, kv, _sequence(asked.token_ids[: 4 * kv.block_size * asked.until], asked.salt)


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


def _report(kv: PrefixCachingBlockManager, what: str, count: int, asked: Blocks) -> None:
    if kv.events.on:
        kv.events.emit(BlocksMoved(what, "peer", count, count * asked.layout.block_bytes, -1))


def _on_workers(engine: LLMEngine, function: Any, asked: Blocks, ids: list[int], skip: int, count: int) -> None:
    memory = msgspec.structs.astuple(asked.memory)
    engine.executor.collective_rpc(function, memory, asked.layout.ranks, ids, skip, count)


# --- on each rank, of whose cache a block is [2L, words of 4 bytes] ----------------------------------------------------


def cache_facts(worker: Worker) -> tuple[str, str, tuple[int, ...]]:
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


def read_blocks(worker: Worker, memory: tuple[Any, ...], ranks: int, ids: list[int], skip: int, count: int) -> None:
    """Copy blocks from the rank's cache to its part of shared memory, which holds `count`, and wait until they are there."""
    with worker.current, torch.inference_mode():
        cache, shared = _both(worker, memory, ranks, count)
        for at, part in _parts(cache, ids):
            blocks = cache.index_select(1, part).transpose(0, 1).contiguous()
            shared[skip + at : skip + at + len(part)].copy_(blocks, non_blocking=True)
        if cache.is_cuda:
            torch.cuda.current_stream().synchronize()


def write_blocks(worker: Worker, memory: tuple[Any, ...], ranks: int, ids: list[int], skip: int, count: int) -> None:
    """Copy blocks from shared memory, of which the first `skip` are left out, to the rank's cache.

    It returns when the memory has been read. The copy within the device comes in its turn among the steps.
    """
    with worker.current, torch.inference_mode():
        cache, shared = _both(worker, memory, ranks, count)
        stream = torch.cuda.Stream() if cache.is_cuda else None  # beside the step that runs
        for at, part in _parts(cache, ids):
            with torch.cuda.stream(stream):
                blocks = shared[skip + at : skip + at + len(part)].to(cache.device, non_blocking=True)
            if stream is not None:
                stream.synchronize()
                blocks.record_stream(torch.cuda.current_stream())
            cache.index_copy_(1, part, blocks.transpose(0, 1))


def runner_of(worker: Worker) -> ModelRunner:
    """What owns the cache of a worker: the runner within, where one captures steps."""
    return cast(ModelRunner, getattr(worker.runner, "inner", worker.runner))


def _both(worker: Worker, memory: tuple[Any, ...], ranks: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache of this rank [2L, N, words], and its part of shared memory with `count` blocks [count, 2L, words]."""
    cache = runner_of(worker).kv_cache.view(torch.int32).flatten(3).flatten(0, 1)
    pieces, _, width = cache.shape
    shared = _mapped(worker, SegmentRef(*memory))[START:].view(torch.int32)
    if ranks * count * pieces * width > len(shared):
        raise ValueError(f"{count} blocks do not fit into shared memory of {4 * len(shared)} bytes")
    parts = shared[: ranks * count * pieces * width].view(ranks, count, pieces, width)
    return cache, parts[torch.distributed.get_rank() if ranks > 1 else 0]


def _parts(cache: torch.Tensor, ids: list[int]) -> list[tuple[int, torch.Tensor]]:
    """The blocks in parts of COPIED bytes at most: where each part begins, and its ids on the device, for which the host does not wait."""
    n = max(1, COPIED // (4 * cache.shape[0] * cache.shape[2]))
    there = torch.tensor(ids)
    if cache.is_cuda:
        there = there.pin_memory().to(cache.device, non_blocking=True)
    return [(at, there[at : at + n]) for at in range(0, len(ids), n)]


def _mapped(worker: Worker, ref: SegmentRef) -> torch.Tensor:
    """A segment as bytes. It stays mapped, and pinned where there is a GPU (which takes long), until many others have come."""
    mapped: dict[SegmentRef, torch.Tensor] = worker.state.setdefault("kv_segments", {})
    is_cuda = runner_of(worker).kv_cache.is_cuda
    if ref not in mapped:
        if len(mapped) == MOST_MAPPED:
            oldest = mapped.pop(next(iter(mapped)))
            if is_cuda:
                torch.cuda.cudart().cudaHostUnregister(oldest.data_ptr())
        try:
            mapped[ref] = torch.frombuffer(open_segment(ref, is_ours=True), dtype=torch.uint8)
        except WireError as error:
            raise ValueError(str(error)) from error  # of a kind that travels between ranks
        if is_cuda:  # what cannot be pinned is copied in the slower way
            torch.cuda.cudart().cudaHostRegister(mapped[ref].data_ptr(), ref.size, 0)
    return mapped[ref]
