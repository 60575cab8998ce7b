"""K/V of a prompt out of an engine's cache, and into another's: what a server calls beside its engine, between two steps.

Blocks that come from elsewhere become cached blocks that no sequence holds. The request that they are for is then queued like
any other, and finds them as a prefix (M5): so its text is that of a prefix hit. No call leaves a block held, so that a transfer
can neither fill the cache for good nor let others wait. If the blocks are needed for something else before the request is
admitted, it computes them.
"""

from __future__ import annotations

import mmap
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import torch
import xxhash

from folovllm.cache.prefix_cache import PrefixCachingBlockManager, compute_hash
from folovllm.electives.kv_transfer.identity import model_digest
from folovllm.electives.kv_transfer.segment import START, open_segment
from folovllm.electives.kv_transfer.wire import Layout, SegmentRef, WireError
from folovllm.layers.attention import attention_layers
from folovllm.models.model_config import num_kv_heads_of, num_linear_of
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from folovllm.engine.llm_engine import LLMEngine

MOST_MAPPED = 16  # segments that a worker keeps mapped
_layouts: weakref.WeakKeyDictionary[LLMEngine, Layout] = weakref.WeakKeyDictionary()
COPIED = 32 << 20  # bytes that one copy moves at most: they need room on the device, beside the cache
Worker = GPUWorker[Any, Any]


class Blocks(msgspec.Struct, array_like=True, frozen=True):
    """Blocks `first` to `end - 1` of a prompt, and where their K/V lie on this host. A server hands this to its engine."""

    token_ids: bytes  # from the beginning of the prompt, int32
    salt: str | None
    first: int
    end: int
    memory: SegmentRef
    until: int = 0  # of those that are to be taken in now: all in front of this number
    layout: Layout | None = None  # of those

    def encoded(self) -> bytes:
        """As a message to the engine has it."""
        return msgspec.msgpack.encode(self)


def layout_of(engine: LLMEngine, query: dict[str, Any]) -> bytes:
    """The `Layout` of an engine, encoded. Raises ValueError if its K/V cannot travel."""
    return msgspec.msgpack.encode(_layout(engine))


def look_up(engine: LLMEngine, query: dict[str, Any]) -> bytes:
    """How many blocks at the beginning of a prompt are cached, and the hash before its first block. `query` has its `token_ids` and `salt`.

    Returns:
        The engine's `Layout` and these two numbers, encoded.
    """
    cache, seq = _manager(engine).prefix_cache, _sequence(query["token_ids"], query["salt"])
    return msgspec.msgpack.encode((_layout(engine), len(cache.longest_cached_prefix(seq)), cache.root_of(seq)))


def export_blocks(engine: LLMEngine, query: dict[str, Any]) -> bytes | None:
    """Copy `Blocks` from the cache to their memory, as many as are there.

    Returns:
        The `Layout`, encoded, then the key of each block that was copied; None if the first one is not cached any more.
    """
    asked, kv, layout = _decoded(query), _manager(engine), _layout(engine)
    seq = _sequence(asked.token_ids[: 4 * layout.block_size * asked.end], asked.salt)
    found = kv.prefix_cache.longest_cached_prefix(seq)[asked.first :]
    if not found:
        return None
    ids = [block.block_id for block in found]
    _on_workers(engine, read_blocks, asked.memory, ids, layout)
    return msgspec.msgpack.encode((layout, [block.hash for block in found]))


def import_blocks(engine: LLMEngine, query: dict[str, Any]) -> int:
    """Copy `Blocks` from their memory to the cache, where requests find them.

    Returns:
        The number of blocks that the prompt has in the cache now; fewer than `until` if there is no room.

    Raises:
        ValueError: the engine's layout is another by now (its weights have changed), or it sleeps, or the memory is gone.
    """
    asked, kv, layout = _decoded(query), _manager(engine), _layout(engine)
    layout.require_same(asked.layout or layout)
    if engine.refusal:
        raise ValueError(engine.refusal)
    seq = _sequence(asked.token_ids[: 4 * layout.block_size * asked.until], asked.salt)
    try:
        kv.get_computed_blocks(seq)
        have = len(seq.block_table)
        missing = (asked.until - have) * layout.block_size
        if have < asked.first or missing <= 0 or not kv.can_allocate(seq, missing):
            return have
        kv.allocate(seq, missing)
        if (connector := getattr(kv, "connector", None)) is not None:
            connector.build_connector_meta(SchedulerOutput(()))  # it saves first what these blocks held
        skip, count = have - asked.first, asked.end - asked.first
        _on_workers(engine, write_blocks, asked.memory, seq.block_table[have:], layout, skip, count)
        seq.num_computed_tokens = asked.until * layout.block_size
        kv.cache_blocks(seq)
        return asked.until
    finally:
        kv.free(seq)


def block_keys(token_ids: bytes, block_size: int, root: int) -> list[int]:
    """The chained hash of each block of a prompt, behind the hash `root`."""
    keys = [root]
    for block in np.frombuffer(token_ids, np.int32).reshape(-1, block_size):
        keys.append(compute_hash(block, keys[-1]))
    return keys[1:]


def _decoded(query: dict[str, Any]) -> Blocks:
    return msgspec.msgpack.decode(query["blocks"], type=Blocks)


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
    """The layout of the cache. What ranks must be asked for is kept until the weights change."""
    weights = int(getattr(_manager(engine).prefix_cache.root, "number", 0))
    if (known := _layouts.get(engine)) is None or known.weights != weights:
        setup, (facts, *others) = engine.setup, engine.executor.collective_rpc(cache_facts)
        scales = "".join(each[2] for each in (facts, *others))
        heads, size = num_kv_heads_of(setup.hf_config), setup.block_size
        known = Layout(model_digest(setup), weights, facts[3], scales, facts[0], heads, size, facts[1])
        _layouts[engine] = known
    return known


def _on_workers(
    engine: LLMEngine, function: Any, memory: SegmentRef, ids: list[int], layout: Layout, *rest: int
) -> None:
    size = engine.setup.config.tensor_parallel_size
    engine.executor.collective_rpc(function, size, msgspec.structs.astuple(memory), ids, layout.num_kv_heads, *rest)


# --- on each rank --------------------------------------------------------------------------------------------------


def cache_facts(worker: Worker) -> tuple[int, int, str, str]:
    """What a rank knows of its cache: layers, bytes of one token's key in one head, a digest of the scales of 8 bits, and the dtype."""
    runner = runner_of(worker)
    cache, digest = runner.kv_cache, xxhash.xxh3_64()
    for layer in attention_layers(runner.model) if cache.element_size() == 1 else ():
        digest.update(repr((layer.scales.key, layer.scales.value)).encode())
        if (offset := layer.scales.offset) is not None:
            digest.update(offset.float().cpu().numpy().tobytes())
    name = str(cache.dtype).removeprefix("torch.")
    scales = digest.hexdigest() if cache.element_size() == 1 else ""
    return cache.shape[0], cache.shape[-1] * cache.element_size(), scales, name


def read_blocks(worker: Worker, size: int, memory: tuple[Any, ...], ids: list[int], num_heads: int) -> None:
    """Copy blocks from the rank's cache to shared memory, its own heads of [Hkv, n, L, 2, B, D], and wait until they are there."""
    cache, shared = _both(worker, size, memory, len(ids), num_heads)
    with worker.current, torch.inference_mode():
        for at, part in _parts(cache, ids):
            blocks = cache.index_select(2, part).permute(3, 2, 0, 1, 4, 5).contiguous()
            for head, source in zip(shared, blocks, strict=True):
                head[at : at + len(part)].copy_(source, non_blocking=True)
        if cache.is_cuda:
            torch.cuda.current_stream().synchronize()


def write_blocks(
    worker: Worker, size: int, memory: tuple[Any, ...], ids: list[int], num_heads: int, skip: int, count: int
) -> None:
    """Copy blocks from shared memory, which holds `count` and of which `skip` are left out, to the rank's cache.

    It returns when the memory has been read. The copy within the device comes in its turn among the steps.
    """
    cache, shared = _both(worker, size, memory, count, num_heads)
    with worker.current, torch.inference_mode():
        stream = torch.cuda.Stream() if cache.is_cuda else None  # beside the step that runs
        for at, part in _parts(cache, ids):
            with torch.cuda.stream(stream):
                source = shared[:, skip + at : skip + at + len(part)]
                blocks = torch.empty(source.shape, dtype=torch.uint8, device=cache.device)
                for head, given in zip(blocks, source, strict=True):
                    head.copy_(given, non_blocking=True)
            if stream is not None:
                stream.synchronize()
                blocks.record_stream(torch.cuda.current_stream())
            cache.index_copy_(2, part, blocks.permute(2, 3, 1, 0, 4, 5))


def runner_of(worker: Worker) -> ModelRunner:
    """What owns the cache of a worker: the runner within, where one captures steps."""
    return cast(ModelRunner, getattr(worker.runner, "inner", worker.runner))


def _both(
    worker: Worker, size: int, memory: tuple[Any, ...], count: int, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache of this rank as bytes [L, 2, N, h, B, D], and its heads of shared memory with `count` blocks [h, count, L, 2, B, D]."""
    cache = runner_of(worker).kv_cache.view(torch.uint8)
    layers, two, _, heads, *block = cache.shape
    rank = torch.distributed.get_rank() if size > 1 else 0
    begin = rank * num_heads // size  # as `shard_qkv`
    shape = (num_heads, count, layers, two, *block)
    shared = _mapped(worker, SegmentRef(*memory))
    num_bytes = int(np.prod(shape))
    if num_bytes > shared.numel():
        raise ValueError(f"{count} blocks of {num_bytes} bytes do not fit into shared memory of {shared.numel()}")
    return cache, shared[:num_bytes].view(shape)[begin : begin + heads]


def _parts(cache: torch.Tensor, ids: list[int]) -> list[tuple[int, torch.Tensor]]:
    """The blocks in parts of COPIED bytes at most: where each part begins, and its ids on the device."""
    block = cache.numel() // cache.shape[2]
    n = max(1, COPIED // block)
    return [(at, torch.tensor(ids[at : at + n], device=cache.device)) for at in range(0, len(ids), n)]


def _mapped(worker: Worker, ref: SegmentRef) -> torch.Tensor:
    """A segment as bytes, without its first page. It stays mapped, and is pinned where there is a GPU: that takes long."""
    mapped: OrderedDict[SegmentRef, Mapped] = worker.state.setdefault("kv_segments", OrderedDict())
    if ref not in mapped:
        try:
            mapped[ref] = Mapped(open_segment(ref, is_ours=True), runner_of(worker).kv_cache.is_cuda)
        except WireError as error:
            raise ValueError(str(error)) from error  # of a kind that travels between ranks
        while len(mapped) > MOST_MAPPED:
            mapped.popitem(last=False)[1].close()
    mapped.move_to_end(ref)
    return mapped[ref].bytes[START:]


class Mapped:
    """A segment in this process."""

    def __init__(self, memory: mmap.mmap, pin: bool) -> None:
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._is_pinned = False
        if pin:  # what cannot be pinned is copied in the slower way
            runtime = torch.cuda.cudart()
            self._is_pinned = int(runtime.cudaHostRegister(self.bytes.data_ptr(), len(memory), 0)) == 0

    def close(self) -> None:
        """Unpin it. It is unmapped with its last user."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
