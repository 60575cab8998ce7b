"""A rank's side of offloading: its blocks in host memory, the copies between them and the cache, and its files.

On a GPU a block goes in three hops. A kernel gathers its pieces into a buffer on the card, behind the steps so far and before the next;
a copy on a stream of its own takes the buffer to pinned memory while the steps go on; and a thread writes it to a file. Back it is
the same from the end. Nobody waits but the request whose blocks they are.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from folovllm.electives.kv_transfer.disk import BlockFiles
from folovllm.worker.graph_runner import GraphRunner

STORE = "kv_transfer"  # of a worker's `state`
BUFFER_BYTES = 64 << 20  # of each buffer on a GPU
CARD_SHARE = 64  # of the card's memory one part in so many is for what leaves; steps wait if more leaves at once
NUM_THREADS = 4


class Piece(NamedTuple):
    """A block on its way."""

    slot: int  # in host memory
    block_id: int  # in the cache
    key: bytes
    token_ids: bytes
    on_disk: bool = False  # it must be read from its file first


@dataclass(slots=True)
class Meta:
    """What a rank is told before a step. Saves come first, for loads may overwrite what they save."""

    saves: dict[int, Piece] = field(
        default_factory=dict
    )  # by slot: of two blocks that came to one slot, the later stays
    loads: dict[int, list[Piece]] = field(default_factory=dict)  # by seq_id
    cancelled: list[int] = field(default_factory=list)
    writes: list[Piece] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.saves or self.loads or self.cancelled or self.writes or self.removed)


@dataclass(slots=True)
class Report:
    """What has ended on a rank since it was asked last."""

    loads: dict[int, set[int]] = field(default_factory=dict)  # by seq_id: which of its blocks could not be read
    written: list[bytes] = field(default_factory=list)
    error: str = ""  # of the disk
    rates: dict[str, float] = field(default_factory=dict)  # bytes a second, by place, where something was measured


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way to the cache."""

    pieces: list[Piece]
    reads: list[Future[tuple[bool, float]]]  # of those on disk
    began: Any = None  # events on a GPU
    done: Any = None
    is_queued: bool = False
    is_cancelled: bool = False
    failed: set[int] = field(default_factory=set)

    @property
    def was_read(self) -> bool:
        """Whether all that was to be read from the disk has been, or could not be."""
        return all(read.done() for read in self.reads)

    @property
    def is_done(self) -> bool:
        """Whether nothing moves any more."""
        if not self.is_queued:
            return self.is_cancelled and self.was_read
        return self.done is None or bool(self.done.query())


class BlockStore:
    """`num_slots` blocks of host memory, and the files behind them if there is a folder."""

    def __init__(self, kv_cache: torch.Tensor, num_slots: int, folder: Path | None, rank: int) -> None:
        """`kv_cache`: [L, 2, N, Hkv, B, D]. Raises ValueError if the host has no such memory."""
        self.cache = kv_cache.view(torch.uint8).flatten(3).flatten(0, 1)  # [2L, N, bytes]
        pieces, _, piece_bytes = self.cache.shape
        self.block_bytes = pieces * piece_bytes
        try:
            self.host = torch.empty(num_slots, self.block_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise ValueError(
                f"kv_offload: there is no memory for {num_slots:,} blocks of {self.block_bytes:,} bytes"
            ) from error
        self._files = None if folder is None else BlockFiles(folder, rank, self.block_bytes)
        self._pool = ThreadPoolExecutor(NUM_THREADS, "kv-disk")
        self._loads: dict[int, Load] = {}
        self._writes: dict[bytes, Future[None]] = {}
        self._copies = GpuCopies(self.cache, self.host) if kv_cache.is_cuda else None

    def measure_link(self) -> dict[str, float]:
        """Bytes a second to the device. It overwrites blocks and slots, so nothing may be in them yet; the kernels are compiled."""
        if self._copies is None:
            return {}
        pieces = [Piece(i, i, b"", b"") for i in range(min(len(self.host), self.cache.shape[1], 64))]
        self._copies.save(pieces)
        for _ in range(3):
            began, done = self._copies.load(pieces)
            done.synchronize()
        return {"host": len(pieces) * self.block_bytes / max(1e-6, began.elapsed_time(done) / 1e3)}

    def start_load_kv(self, meta: Meta) -> None:
        """Begin all that `meta` says, and wait for nothing."""
        if meta.saves:
            self._save(list(meta.saves.values()))
        for key in meta.removed:
            if self._files is not None:
                self._pool.submit(self._files.remove, key)
        for piece in meta.writes:
            self._writes[piece.key] = self._pool.submit(self._write, piece)
        for seq_id, pieces in meta.loads.items():
            load = Load(pieces, [self._pool.submit(self._read, piece) for piece in pieces if piece.on_disk])
            self._loads[seq_id] = load
            if not load.reads:
                self._queue(load)
        for seq_id in meta.cancelled:
            if (cancelled := self._loads.get(seq_id)) is None:
                continue  # it has ended here, but not on all ranks
            if cancelled.is_queued and self._copies is not None:
                self._copies.let_steps_wait(cancelled.done)
            cancelled.is_cancelled = True

    def get_finished(self) -> Report:
        """What has ended. What was read from the disk by now goes on its way."""
        report = Report()
        for seq_id, load in list(self._loads.items()):
            if load.was_read and not load.is_queued:
                self._note_reads(load, report)
                if not load.is_cancelled:
                    self._queue(load)
            if load.is_done:
                report.loads[seq_id] = load.failed
                self._note_copy(self._loads.pop(seq_id), report)
        for key, write in list(self._writes.items()):
            if write.done():
                del self._writes[key]
                report.written.append(key)
                if (error := write.exception()) is not None:
                    report.error = str(error)
        return report

    def close(self) -> None:
        """End the threads and give the pinned memory back."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._copies is not None:
            self._copies.close()

    def _save(self, pieces: list[Piece]) -> None:
        if self._copies is not None:
            self._copies.save(pieces)
            return
        blocks = self.cache[:, [piece.block_id for piece in pieces]].transpose(0, 1)  # [k, 2L, bytes], a copy
        self.host[[piece.slot for piece in pieces]] = blocks.reshape(len(pieces), -1)

    def _queue(self, load: Load) -> None:
        load.is_queued = True
        pieces = [piece for i, piece in enumerate(load.pieces) if i not in load.failed]
        if self._copies is not None:
            load.began, load.done = self._copies.load(pieces)
        elif pieces:
            blocks = self.host[[piece.slot for piece in pieces]].view(len(pieces), len(self.cache), -1)
            self.cache[:, [piece.block_id for piece in pieces]] = blocks.transpose(0, 1)

    def _row(self, slot: int) -> memoryview:
        return self.host[slot].numpy().data

    def _write(self, piece: Piece) -> None:
        assert self._files is not None
        if self._copies is not None:
            self._copies.wait_for(piece.slot)
        self._files.write(piece.key, piece.token_ids, self._row(piece.slot))

    def _read(self, piece: Piece) -> tuple[bool, float]:
        assert self._files is not None
        start = time.perf_counter()
        if self._copies is not None:
            self._copies.wait_for(piece.slot)  # what the slot held before may still be on its way to it
        return self._files.read(piece.key, piece.token_ids, self._row(piece.slot)), time.perf_counter() - start

    def _note_reads(self, load: Load, report: Report) -> None:
        places = [i for i, piece in enumerate(load.pieces) if piece.on_disk]
        results = [(False, 0.0) if read.exception() else read.result() for read in load.reads]
        load.failed = {i for i, (right, _) in zip(places, results, strict=True) if not right}
        if seconds := sum(seconds for right, seconds in results if right):
            report.rates["disk"] = NUM_THREADS * self.block_bytes * (len(places) - len(load.failed)) / seconds

    def _note_copy(self, load: Load, report: Report) -> None:
        if load.done is not None and (count := len(load.pieces) - len(load.failed)):
            report.rates["host"] = count * self.block_bytes / max(1e-6, load.began.elapsed_time(load.done) / 1e3)


class GpuCopies:
    """The copies between a GPU and pinned memory, on two streams: the link carries both ways at once."""

    def __init__(self, cache: torch.Tensor, host: torch.Tensor) -> None:
        self._host = host
        self._cache = cache.view(torch.int32)  # [2L, N, words]
        status = torch.cuda.cudart().cudaHostRegister(
            host.data_ptr(), host.nbytes, 0
        )  # torch's own rounds up to a power of two
        if int(status) != 0:
            raise ValueError(f"kv_offload: {host.nbytes:,} bytes of memory cannot be pinned: take less")
        self._unpin = weakref.finalize(self, unpin, host)  # also where nobody closes the engine
        self._chunk = max(1, BUFFER_BYTES // host.shape[1])  # blocks
        free, total = torch.cuda.mem_get_info(cache.device)
        count = max(2, min(total // CARD_SHARE, free // 4) // BUFFER_BYTES)
        shape = 1 + count, self._chunk, host.shape[1]
        self._buffers = torch.empty(shape, dtype=torch.uint8, device=cache.device)  # the last is for what comes
        self._out, self._in = torch.cuda.Stream(cache.device), torch.cuda.Stream(cache.device)
        self._left: list[Any] = [None] * count  # when a buffer was read last
        self._turn = 0
        self._saved: dict[int, Any] = {}  # by slot: when its block is there

    def save(self, pieces: list[Piece]) -> None:
        """Gather blocks behind the steps so far, and copy them to their slots while the next ones run."""
        self._saved = {slot: event for slot, event in self._saved.items() if not event.query()}
        steps = torch.cuda.current_stream()
        for chunk in chunks(pieces, self._chunk):
            buffer, left = self._buffers[self._turn], self._left[self._turn]
            if left is not None:
                steps.wait_event(left)
            self._move(chunk, buffer, to_cache=False)
            self._out.wait_stream(steps)
            with torch.cuda.stream(self._out):
                for i, slot, count in runs(chunk):
                    self._host[slot : slot + count].copy_(buffer[i : i + count], non_blocking=True)
            self._left[self._turn] = event = self._out.record_event()
            self._saved |= dict.fromkeys((piece.slot for piece in chunk), event)
            self._turn = (self._turn + 1) % len(self._left)

    def load(self, pieces: list[Piece]) -> tuple[Any, Any]:
        """Copy slots to a buffer and scatter it to their blocks, behind the steps so far and beside the next. Returns when it begins and ends."""
        self._in.wait_stream(torch.cuda.current_stream())  # a step in flight may still write to these blocks
        for event in {
            id(event): event for piece in pieces if (event := self._saved.get(piece.slot)) is not None
        }.values():
            self._in.wait_event(event)
        began, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._in):
            began.record()
            for chunk in chunks(pieces, self._chunk):
                for i, slot, count in runs(chunk):
                    self._buffers[-1][i : i + count].copy_(self._host[slot : slot + count], non_blocking=True)
                self._move(chunk, self._buffers[-1], to_cache=True)
            done.record()
        return began, done

    def let_steps_wait(self, event: Any) -> None:
        """Let the coming steps begin after an event."""
        torch.cuda.current_stream().wait_event(event)

    def wait_for(self, slot: int) -> None:
        """Wait until what was copied to a slot is there. Called by threads."""
        if (event := self._saved.get(slot)) is not None:
            event.synchronize()

    def close(self) -> None:
        """Unpin the memory, once nothing moves."""
        torch.cuda.synchronize()
        self._unpin()

    def _move(self, chunk: list[Piece], buffer: torch.Tensor, *, to_cache: bool) -> None:
        """Between the blocks of a chunk and the front of a buffer, on the current stream."""
        from folovllm.electives.kv_transfer.kernels.pieces import (
            move_pieces,
        )  # here, for Triton may be missing on a CPU

        ids = torch.tensor([piece.block_id for piece in chunk], dtype=torch.int32).pin_memory()
        lines = buffer[: len(chunk)].view(torch.int32).view(len(chunk), len(self._cache), -1)
        move_pieces(self._cache, lines, ids.to(buffer.device, non_blocking=True), to_cache=to_cache)


def unpin(host: torch.Tensor) -> None:
    """Take back the registration of `host` before its memory is freed."""
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())


def chunks(pieces: list[Piece], size: int) -> Iterator[list[Piece]]:
    """Pieces in the order of their slots, so many at a time."""
    pieces = sorted(pieces)
    return (pieces[i : i + size] for i in range(0, len(pieces), size))


def runs(chunk: list[Piece]) -> Iterator[tuple[int, int, int]]:
    """Neighbouring slots are one copy: where it begins in the chunk, its first slot, and how many there are."""
    first = 0
    for i in range(1, len(chunk) + 1):
        if i == len(chunk) or chunk[i].slot != chunk[i - 1].slot + 1:
            yield first, chunk[first].slot, i - first
            first = i


# --- what the driver calls on each rank (`Executor.collective_rpc`) ---


def register_kv_caches(
    worker: Any, num_bytes: int, folder: Path | None, num_ranks: int
) -> tuple[int, int, dict[str, float]]:
    """Make a rank's store of `num_bytes`; returns its slots, the bytes of a block, and what was measured of the link.

    Raises ValueError if they hold no block, or cannot be had.
    """
    rank = dist.get_rank() if num_ranks > 1 else 0
    runner = worker.runner.inner if isinstance(worker.runner, GraphRunner) else worker.runner
    cache: torch.Tensor = runner.kv_cache
    block_bytes = cache.nbytes // cache.shape[2]
    num_slots = num_bytes // block_bytes
    if not num_slots:
        raise ValueError(f"kv_offload holds no block: each rank has {num_bytes:,} bytes, and a block {block_bytes:,}")
    with worker.current:
        worker.state[STORE] = store = BlockStore(cache, num_slots, folder, rank)
        return num_slots, block_bytes, store.measure_link()


def on_store(worker: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a rank's store."""
    with worker.current, torch.inference_mode():
        return getattr(worker.state[STORE], method)(*arguments)
