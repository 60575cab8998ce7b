"""A rank's side of offloading: its blocks in host memory, the copies between them and the cache, and its files.

On a GPU a block goes in three hops. A kernel gathers its pieces into a buffer on the card, behind the steps so far and before the next;
a copy on a stream of its own takes the buffer to pinned memory while the steps go on; and a thread writes it to a file. Back it is
the same from the end. Nobody waits but the request whose blocks they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from folovllm.electives.kv_transfer.disk import BlockFiles
from folovllm.electives.kv_transfer.rank_cache import block_bytes_of, cache_of, move, on_device, pin, rank_of

STORE = "kv_transfer"  # of a worker's `state`
BUFFER_BYTES = 64 << 20  # of each buffer on a GPU
CARD_SHARE = 64  # of the card's memory one part in so many is for what leaves; steps wait if more leaves at once
NUM_THREADS = 4
HOST_RATE = 20e9  # bytes a second between a CPU's memory and itself
NOT_KEPT = -2  # the slot of an evicted block that is not kept


class BlockFile(NamedTuple):
    """A block's slot in host memory, and what its file says of it."""

    slot: int
    key: bytes
    token_ids: bytes


@dataclass(slots=True)
class ConnectorMetadata:
    """What a rank is told before a step. Evicted blocks are gathered first, for loads may overwrite them."""

    evicted: list[int] = field(default_factory=list)  # ids; their slots follow (`BlockStore.save`)
    reads: dict[int, dict[int, BlockFile]] = field(default_factory=dict)  # by seq_id and number
    loads: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)  # by seq_id: slots, and blocks for them
    cancelled: list[int] = field(default_factory=list)  # of these loads


class Report(NamedTuple):
    """What has ended on a rank since it was asked last."""

    loads: dict[int, set[int]]  # by seq_id, loads or reads that ended: indices of blocks whose files could not be read
    writes: list[str | None]  # what went wrong with each, "": nothing; None: its block left before its turn came
    disk_rate: float  # bytes a second, 0: nothing was read


class BlockStore:
    """`num_slots` blocks of host memory, and the files behind them if there is a folder."""

    def __init__(self, cache: torch.Tensor, num_slots: int, files: BlockFiles | None) -> None:
        """`cache`: [2L, N, words]."""
        self.cache, (pieces, _, words) = cache, cache.shape
        self.host = torch.empty(num_slots, pieces, words, dtype=torch.int32)
        self.copies = (GpuCopies if cache.is_cuda else CpuCopies)(cache, self.host)
        self._loads: dict[int, Any] = {}  # by seq_id: the event of the copy's end; None: it has ended
        self._files: Any = files  # asked for nothing if there is no folder
        self._readers, self._writers = (ThreadPoolExecutor(NUM_THREADS, f"kv-{what}") for what in ("read", "write"))
        self._reads: dict[int, dict[int, Future[None]]] = {}  # by seq_id and number
        self._writes: dict[int, Future[None]] = {}  # by slot, the last one
        self._written, self._read_seconds = list[str | None](), list[float]()  # since they were reported

    def start_load_kv(self, meta: ConnectorMetadata) -> None:
        """Begin all that `meta` says, and wait for nothing."""
        if meta.evicted:
            self.copies.gather(meta.evicted)
        for seq_id, files in meta.reads.items():
            submit, vacate = self._readers.submit, self._vacate
            self._reads[seq_id] = {i: submit(self._read, file, vacate([file.slot])) for i, file in files.items()}
        for seq_id, (slots, block_ids) in meta.loads.items():
            self._loads[seq_id] = self.copies.load(slots, block_ids)
        for seq_id in meta.cancelled:
            if (event := self._loads.get(seq_id)) is not None:
                torch.cuda.current_stream().wait_event(event)  # the coming steps may write to its blocks

    def save(self, slots: list[int], files: list[BlockFile]) -> None:
        """Copy what was gathered last to its slots. Then write files, each unless its slot gets another block before its turn comes."""
        self.copies.send(slots, self._vacate(slots))
        for file in files:
            self._writes[file.slot] = self._writers.submit(self._write, file)

    def get_finished(self) -> Report:
        """What has ended."""
        loads = dict[int, set[int]]()
        for seq_id, event in list(self._loads.items()):
            if event is None or event.query():
                loads[seq_id] = set()
                del self._loads[seq_id]
        for seq_id, files in list(self._reads.items()):
            if all(file.done() for file in files.values()):
                loads[seq_id] = {i for i, file in files.items() if file.exception()}
                del self._reads[seq_id]
        seconds, self._read_seconds = self._read_seconds, []
        rate = NUM_THREADS * self.host[0].nbytes * len(seconds) / sum(seconds) if seconds else 0.0
        written = self._written[:]
        del self._written[: len(written)]
        return Report(loads, written, rate)

    def close(self) -> None:
        """End the threads and give the pinned memory back."""
        for pool in (self._readers, self._writers):
            pool.shutdown(wait=True, cancel_futures=True)
        self.copies.close()

    def _vacate(self, slots: list[int]) -> list[Future[None]]:
        """Call off the writes from slots that get other blocks. Returns those that go on: the slots may be filled behind them."""
        writes = [self._writes.pop(slot) for slot in slots if slot in self._writes]
        busy = [write for write in writes if not write.cancel()]
        self._written += [None] * (len(writes) - len(busy))
        return busy

    def _write(self, file: BlockFile) -> None:
        try:
            self.copies.wait_for([file.slot])
            self._files.write(file.key, file.token_ids, self._row(file))
            self._written.append("")
        except Exception as error:
            self._written.append(str(error) or repr(error))

    def _read(self, file: BlockFile, busy: list[Future[None]]) -> None:
        """Raises ValueError if the file is not there, or not right."""
        wait(busy)
        self.copies.wait_for([file.slot])
        start = time.perf_counter()
        if not self._files.read(file.key, file.token_ids, self._row(file)):
            raise ValueError("no such block")
        self._read_seconds.append(time.perf_counter() - start)

    def _row(self, file: BlockFile) -> memoryview:
        """The bytes of a file's slot."""
        return self.host[file.slot].numpy().data.cast("B")


class CpuCopies:
    """The copies where the cache is host memory, too: each has ended when the call returns."""

    def __init__(self, cache: torch.Tensor, host: torch.Tensor) -> None:
        self._cache, self._host, self.room = cache, host, cache.shape[1]
        self._gathered = torch.empty(0)  # [k, 2L, words], until their slots are known

    def measure(self) -> float:
        """Bytes a second to the device. It overwrites blocks and slots, so nothing may be in them yet."""
        return HOST_RATE

    def gather(self, block_ids: list[int]) -> None:
        """Copy blocks, `room` at most, behind the steps so far and before the next. `send` must follow."""
        self._gathered = self._cache[:, torch.tensor(block_ids)].transpose(0, 1)

    def send(self, slots: list[int], busy: list[Future[None]]) -> None:
        """Copy what was gathered to its slots, when `busy` have ended."""
        wait(busy)
        for slot, block in zip(slots, self._gathered, strict=False):
            if slot != NOT_KEPT:
                self._host[slot] = block

    def load(self, slots: list[int], block_ids: list[int]) -> Any:
        """Copy slots to blocks. Returns the event of the end, None: it has ended."""
        move(self._cache, self._host[torch.tensor(slots)], torch.tensor(block_ids), to_cache=True)

    def wait_for(self, slots: list[int]) -> None:
        """Wait until what was sent to these slots is there. Threads call it, too."""

    def close(self) -> None:
        """Give back what was taken, once nothing moves."""


class GpuCopies(CpuCopies):
    """The copies between a GPU and pinned memory, on two streams: the link carries both ways at once.

    A thread sends one buffer after the other. If all waited in the link's queue, the next step's sampled tokens would wait behind them.
    """

    def __init__(self, cache: torch.Tensor, host: torch.Tensor) -> None:
        """Raises ValueError if the memory cannot be pinned."""
        self._cache, self._host = cache, host
        unpin = pin(host, self)  # also unpins when `self` is collected, in case nobody closes the engine
        if unpin is None:
            raise ValueError(f"kv_offload: {host.nbytes:,} bytes of memory cannot be pinned: take less")
        self._unpin, self._chunk = unpin, max(1, BUFFER_BYTES // host[0].nbytes)  # blocks
        free, total = torch.cuda.mem_get_info(cache.device)
        count = max(2, min(total // CARD_SHARE, free // 4) // BUFFER_BYTES)
        self.room = count * self._chunk
        shape = 1 + count, self._chunk, *host.shape[1:]
        self._incoming, *self._buffers = torch.empty(shape, dtype=host.dtype, device=cache.device)
        self._next = cycle(range(count))  # the buffer to fill
        self._filled: dict[int, int] = {}  # how many blocks are in each that is not sent yet
        self._sent: dict[int, Future[None]] = {}  # by buffer
        self._sent_to: dict[int, Future[None]] = {}  # by slot
        self._out, self._in = torch.cuda.Stream(cache.device), torch.cuda.Stream(cache.device)
        self._came: Any = None  # the event of the last load's end
        self._sender = ThreadPoolExecutor(1, "kv-send")

    def measure(self) -> float:
        """Bytes a second to the device; the kernels are compiled."""
        numbers = list(range(min(len(self._host), self.room, self._cache.shape[1], 64)))
        self.gather(numbers)
        self.send(numbers, [])
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.load(numbers, numbers).synchronize()
        return len(numbers) * self._host[0].nbytes / (time.perf_counter() - start)

    def gather(self, block_ids: list[int]) -> None:
        for part in on_device(block_ids, self._cache.device).split(self._chunk):
            number = next(self._next)
            if number in self._sent:
                self._sent[number].result()
            move(self._cache, self._buffers[number][: len(part)], part, to_cache=False)
            self._filled[number] = len(part)

    def send(self, slots: list[int], busy: list[Future[None]]) -> None:
        """Have what was gathered copied to its slots, while the next steps run."""
        is_gathered = torch.cuda.current_stream().record_event()
        for number, count in self._filled.items():
            own, slots = slots[:count], slots[count:]
            sent = self._sender.submit(self._send, self._buffers[number], own, is_gathered, busy)
            self._sent[number] = sent
            self._sent_to |= dict.fromkeys(own, sent)
        self._filled.clear()

    @torch.inference_mode()
    def _send(self, lines: torch.Tensor, slots: list[int], is_gathered: Any, busy: list[Future[None]]) -> None:
        """Copy a buffer to its slots, and wait for the end. What comes has the link first, for somebody waits for it."""
        wait(busy)
        if self._came is not None:
            self._came.synchronize()
        with torch.cuda.stream(self._out):
            self._out.wait_event(is_gathered)
            for i, j in runs(slots):
                if slots[i] != NOT_KEPT:
                    self._host[slots[i] : slots[i] + j - i].copy_(lines[i:j], non_blocking=True)
        self._out.synchronize()

    def load(self, slots: list[int], block_ids: list[int]) -> Any:
        """Copy slots to a buffer and scatter it to their blocks, behind the steps so far and beside the next."""
        slots, block_ids = map(list, zip(*sorted(zip(slots, block_ids, strict=True)), strict=True))
        self._in.wait_stream(torch.cuda.current_stream())  # a step in flight may still write to these blocks
        self.wait_for(slots)
        with torch.cuda.stream(self._in):
            for ids in on_device(block_ids, self._cache.device).split(self._chunk):
                part, slots = slots[: len(ids)], slots[len(ids) :]
                for i, j in runs(part):
                    self._incoming[i:j].copy_(self._host[part[i] : part[i] + j - i], non_blocking=True)
                move(self._cache, self._incoming[: len(part)], ids, to_cache=True)
        self._came = self._in.record_event()
        return self._came

    def wait_for(self, slots: list[int]) -> None:
        for sent in {self._sent_to[slot] for slot in slots if slot in self._sent_to}:
            sent.result()

    def close(self) -> None:
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
    """Make a rank's store, whose share of both sizes is that of each rank. Returns its slots and room, the bytes of a block, and the link's
    bytes a second. Raises ValueError if it holds no block, or cannot be pinned.
    """
    block_bytes, shares = block_bytes_of(worker), (num_bytes // num_ranks, folder_bytes // num_ranks)
    for name, size in zip(("kv_offload", "kv_offload_dir_size"), shares, strict=True):
        if size < block_bytes:
            raise ValueError(f"{name} holds no block: each rank has {size:,} bytes, and a block {block_bytes:,}")
    files = None if folder is None else BlockFiles(folder, rank_of(num_ranks), shares[1])
    with worker.current:
        worker.state[STORE] = store = BlockStore(cache_of(worker), shares[0] // block_bytes, files)
        return len(store.host), store.copies.room, block_bytes, store.copies.measure()


def on_store(worker: Any, method: str, *arguments: Any) -> Any:
    """Call a method of a rank's store."""
    with worker.current, torch.inference_mode():
        return getattr(worker.state[STORE], method)(*arguments)
