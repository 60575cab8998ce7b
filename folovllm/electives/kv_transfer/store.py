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

import numpy as np
import torch
import torch.distributed as dist

from folovllm.electives.kv_transfer.disk import BlockFiles
from folovllm.electives.kv_transfer.rank_cache import block_bytes_of, cache_of, move, on_device

STORE = "kv_transfer"  # of a worker's `state`
BUFFER_BYTES = 64 << 20  # of each buffer on a GPU
CARD_SHARE = 64  # of the card's memory one part in so many is for what leaves; steps wait if more leaves at once
NUM_THREADS = 4
HOST_RATE = 20e9  # bytes a second between a CPU's memory and itself
NOT_KEPT = -2  # the slot of an evicted block that is not kept


class BlockFile(NamedTuple):
    """A block's place in host memory, and what its file says of it."""

    slot: int
    key: bytes
    token_ids: bytes


class Transfer(NamedTuple):
    """Blocks that a request waits for: number i goes from `slots[i]` of host memory to block `block_ids[i]` of the cache."""

    slots: list[int]
    block_ids: list[int]
    files: dict[int, BlockFile]  # by number: those that must be read from disk first


@dataclass(slots=True)
class ConnectorMetadata:
    """What a rank is told before a step. Evicted blocks are gathered first, for loads may overwrite them."""

    evicted: list[int] = field(default_factory=list)  # ids; their slots follow (`BlockStore.save`)
    loads: dict[int, Transfer] = field(default_factory=dict)  # by seq_id
    cancelled: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What has ended on a rank since it was asked last."""

    loads: dict[int, set[int]] = field(default_factory=dict)  # by seq_id: which of its blocks could not be read
    written: list[bytes] = field(default_factory=list)
    error: str = ""  # of the disk
    disk_rate: float = 0.0  # bytes a second, 0: nothing was read


@dataclass(slots=True, eq=False)
class Load:
    """A transfer that is under way: first files are read, then all blocks are copied."""

    transfer: Transfer
    reads: dict[int, Future[float]]  # by number, of those on disk: the seconds it took
    failed: set[int] = field(default_factory=set)  # those that could not be read
    is_cancelled: bool = False
    is_copying: bool = False
    done: Any = None  # an event on a GPU


class BlockStore:
    """`num_slots` blocks of host memory, and the files behind them if there is a folder."""

    def __init__(self, cache: torch.Tensor, num_slots: int, files: BlockFiles | None) -> None:
        """`cache`: [2L, N, words]."""
        self.cache, (pieces, _, words) = cache, cache.shape
        self.block_bytes = 4 * pieces * words
        self.host = torch.empty(num_slots, pieces, words, dtype=torch.int32)
        self._copies = (GpuCopies if cache.is_cuda else CpuCopies)(cache, self.host)
        self.room = self._copies.room  # evicted blocks at a time
        self._files: Any = files  # asked for nothing if there is no folder
        self._pool = ThreadPoolExecutor(NUM_THREADS, "kv-disk")
        self._loads: dict[int, Load] = {}  # by seq_id
        self._writes: dict[bytes, Future[None]] = {}

    def measure_link(self) -> float:
        """Bytes a second to the device. It overwrites blocks and slots, so nothing may be in them yet; the kernels are compiled."""
        if not self.cache.is_cuda:
            return HOST_RATE
        numbers = list(range(min(len(self.host), self.room, self.cache.shape[1], 64)))
        self._copies.gather(numbers)
        self._copies.send(numbers)
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._copies.load(numbers, numbers).synchronize()
        return len(numbers) * self.block_bytes / (time.perf_counter() - start)

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        """Begin all that `meta` says, and wait for nothing."""
        if meta.evicted:
            self._copies.gather(meta.evicted)
        for seq_id, transfer in meta.loads.items():
            reads = {i: self._pool.submit(self._read, file) for i, file in transfer.files.items()}
            self._loads[seq_id] = load = Load(transfer, reads)
            if not reads:
                self._copy(load)
        for seq_id in meta.cancelled:
            if (cancelled := self._loads.get(seq_id)) is not None:
                cancelled.is_cancelled = True
                if cancelled.done is not None:
                    torch.cuda.current_stream().wait_event(cancelled.done)  # the coming steps may write to its blocks

    def save(self, slots: list[int], writes: list[BlockFile]) -> None:
        """Copy what was gathered last to its slots. Then write files."""
        self._copies.send(slots)
        for file in writes:
            self._writes[file.key] = self._pool.submit(self._write, file)

    def get_finished(self) -> Report:
        """What has ended. What was read from the disk by now goes on its way."""
        report = Report()
        for seq_id, load in list(self._loads.items()):
            if not load.is_copying and all(read.done() for read in load.reads.values()):
                load.failed = {i for i, read in load.reads.items() if read.exception()}
                if seconds := [read.result() for i, read in load.reads.items() if i not in load.failed]:
                    report.disk_rate = NUM_THREADS * self.block_bytes * len(seconds) / sum(seconds)
                self._copy(load)
            if load.is_copying and (load.done is None or load.done.query()):
                report.loads[seq_id] = self._loads.pop(seq_id).failed
        for key in [key for key, write in self._writes.items() if write.done()]:
            report.written.append(key)
            if (error := self._writes.pop(key).exception()) is not None:
                report.error = str(error)
        return report

    def close(self) -> None:
        """End the threads and give the pinned memory back."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._copies.close()

    def _copy(self, load: Load) -> None:
        """Have a load copied to the cache, unless nobody waits for it."""
        load.is_copying = True
        numbers = [i for i in range(len(load.transfer.slots)) if i not in load.failed]
        if numbers and not load.is_cancelled:
            slots, block_ids, _ = load.transfer
            load.done = self._copies.load([slots[i] for i in numbers], [block_ids[i] for i in numbers])

    def _row(self, slot: int) -> memoryview:
        """A slot's bytes, when nothing is on its way to it."""
        self._copies.wait_for(slot)
        return self.host[slot].numpy().data.cast("B")

    def _write(self, file: BlockFile) -> None:
        self._files.write(file.key, file.token_ids, self._row(file.slot))

    def _read(self, file: BlockFile) -> float:
        """The seconds it took. Raises ValueError if the file is not there, or not right."""
        start = time.perf_counter()
        if not self._files.read(file.key, file.token_ids, self._row(file.slot)):
            raise ValueError("no such block")
        return time.perf_counter() - start


class CpuCopies:
    """The copies where the cache is host memory, too: each has ended when the call returns."""

    def __init__(self, cache: torch.Tensor, host: torch.Tensor) -> None:
        self._cache, self._host, self.room = cache, host, cache.shape[1]
        self._gathered = torch.empty(0)  # [k, 2L, words], until their slots are known

    def gather(self, block_ids: list[int]) -> None:
        """Copy blocks before the next step. `send` must follow."""
        self._gathered = self._cache[:, torch.tensor(block_ids)].transpose(0, 1)

    def send(self, slots: list[int]) -> None:
        """Copy what was gathered to its slots."""
        for slot, block in zip(slots, self._gathered, strict=False):
            if slot != NOT_KEPT:
                self._host[slot] = block

    def load(self, slots: list[int], block_ids: list[int]) -> Any:
        """Copy slots to blocks."""
        move(self._cache, self._host[torch.tensor(slots)], torch.tensor(block_ids), to_cache=True)

    def wait_for(self, slot: int) -> None:
        """Nothing is ever on its way."""

    def close(self) -> None:
        """Nothing is pinned."""


class GpuCopies:
    """The copies between a GPU and pinned memory, on two streams: the link carries both ways at once.

    A thread sends one buffer after the other. If all waited in the link's queue, the next step's sampled tokens would wait behind them.
    """

    def __init__(self, cache: torch.Tensor, host: torch.Tensor) -> None:
        self._cache, self._host, block_bytes = cache, host, host[0].nbytes
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(host.data_ptr(), host.nbytes, 0)  # torch's own rounds up to a power of two
        if int(status) != 0:
            raise ValueError(f"kv_offload: {host.nbytes:,} bytes of memory cannot be pinned: take less")
        self._unpin = weakref.finalize(self, cudart.cudaHostUnregister, host.data_ptr())  # nobody may close the engine
        self._chunk = max(1, BUFFER_BYTES // block_bytes)  # blocks
        free, total = torch.cuda.mem_get_info(cache.device)
        count = max(2, min(total // CARD_SHARE, free // 4) // BUFFER_BYTES)
        shape = 1 + count, self._chunk, *host.shape[1:]
        self._buffers = torch.empty(shape, dtype=host.dtype, device=cache.device)  # the last is for what comes
        self._out, self._in = torch.cuda.Stream(cache.device), torch.cuda.Stream(cache.device)
        self._came: Any = None  # the event of the last load's end
        self._sender = ThreadPoolExecutor(1, "kv-send")
        # Buffers that may be filled, and for each who still reads it.
        self._free: list[tuple[int, Future[None] | None]] = [(i, None) for i in range(count)]
        self.room = count * self._chunk
        self._gathered: list[tuple[int, int]] = []  # buffers that are not sent yet, and how many blocks are in each
        self._sending: list[tuple[Future[None], set[int]]] = []  # slots, and when their blocks are there

    def gather(self, block_ids: list[int]) -> None:
        """Gather blocks, `room` at most, behind the steps so far and before the next. `send` must follow."""
        ids = on_device(block_ids, self._cache.device)
        for part in ids.split(self._chunk):
            number, sending = self._free.pop(0)
            if sending is not None:
                sending.result()
            move(self._cache, self._buffers[number, : len(part)], part, to_cache=False)
            self._gathered.append((number, len(part)))

    def send(self, slots: list[int]) -> None:
        """Have what was gathered copied to its slots, while the next steps run."""
        is_gathered = torch.cuda.current_stream().record_event()
        self._sending = [pair for pair in self._sending if not pair[0].done()]
        for number, count in self._gathered:
            own, slots = slots[:count], slots[count:]
            sending = self._sender.submit(self._send_buffer, number, own, is_gathered)
            self._free.append((number, sending))
            self._sending.append((sending, set(own)))
        self._gathered.clear()

    @torch.inference_mode()
    def _send_buffer(self, number: int, slots: list[int], is_gathered: Any) -> None:
        """Copy a buffer to its slots, and wait for the end. What comes has the link first, for somebody waits for it."""
        if self._came is not None:
            self._came.synchronize()
        with torch.cuda.stream(self._out):
            self._out.wait_event(is_gathered)
            for i, j in runs(slots):
                if slots[i] != NOT_KEPT:
                    self._host[slots[i] : slots[i] + j - i].copy_(self._buffers[number, i:j], non_blocking=True)
        self._out.synchronize()

    def load(self, slots: list[int], block_ids: list[int]) -> Any:
        """Copy slots to a buffer and scatter it to their blocks, behind the steps so far and beside the next. Returns the event of its end."""
        pairs, n, buffer = sorted(zip(slots, block_ids, strict=True)), self._chunk, self._buffers[-1]
        self._in.wait_stream(torch.cuda.current_stream())  # a step in flight may still write to these blocks
        for sending, filled in self._sending:
            if not filled.isdisjoint(slots):
                sending.result()
        with torch.cuda.stream(self._in):
            ids = on_device([block_id for _, block_id in pairs], self._cache.device)
            for at in range(0, len(pairs), n):
                part = [slot for slot, _ in pairs[at : at + n]]
                for i, j in runs(part):
                    buffer[i:j].copy_(self._host[part[i] : part[i] + j - i], non_blocking=True)
                move(self._cache, buffer[: len(part)], ids[at : at + n], to_cache=True)
        self._came = self._in.record_event()
        return self._came

    def wait_for(self, slot: int) -> None:
        """Wait until what was copied to a slot is there. Called by threads."""
        for sending, slots in self._sending:
            if slot in slots:
                sending.result()

    def settle(self) -> None:
        """Wait until all that was sent is there."""
        for sending, _ in self._sending:
            sending.result()

    def close(self) -> None:
        """Unpin the memory, once nothing moves."""
        self._sender.shutdown()
        torch.cuda.synchronize()
        self._unpin()


def runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Where runs of neighbouring slots begin and end in a list: each is one copy."""
    ends = [*(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return zip([0, *ends[:-1]], ends, strict=True)


# --- what the driver calls on each rank (`Executor.collective_rpc`) ---


def register_kv_caches(
    worker: Any, num_bytes: int, folder: Path | None, folder_bytes: int, num_ranks: int
) -> tuple[int, int, int, float]:
    """Make a rank's store of `num_bytes`; returns its slots and room, the bytes of a block, and the link's bytes a second.

    Raises ValueError if they hold no block, or cannot be pinned.
    """
    block_bytes, rank = block_bytes_of(worker), dist.get_rank() if num_ranks > 1 else 0
    for name, size in (("kv_offload", num_bytes), ("kv_offload_dir_size", folder_bytes)):
        if size < block_bytes:
            raise ValueError(f"{name} holds no block: each rank has {size:,} bytes, and a block {block_bytes:,}")
    files = None if folder is None else BlockFiles(folder, rank, folder_bytes)
    with worker.current:
        worker.state[STORE] = store = BlockStore(cache_of(worker), num_bytes // block_bytes, files)
        return len(store.host), store.room, block_bytes, store.measure_link()


def on_store(worker: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a rank's store."""
    with worker.current, torch.inference_mode():
        return getattr(worker.state[STORE], method)(*arguments)
