"""Offloading: what the prefix cache evicts is kept in host memory, and on disk if asked, and comes back where that is faster than computing it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from folovllm.cache.connector import KVConnector
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.electives.kv_transfer.digest import kv_dtype, model_digest
from folovllm.electives.kv_transfer.disk import file_of, private_folder, remove
from folovllm.electives.kv_transfer.index import HostIndex, Slot
from folovllm.electives.kv_transfer.options import num_bytes
from folovllm.electives.kv_transfer.plan import block_key, blocks_to_load, requests_to_recompute
from folovllm.electives.kv_transfer.store import (
    NOT_KEPT,
    BlockFile,
    ConnectorMetadata,
    Report,
    Transfer,
    on_store,
    register_kv_caches,
)
from folovllm.engine.events import BlocksMoved
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput

if TYPE_CHECKING:
    from folovllm.cache.block_manager import Block
    from folovllm.engine.setup import EngineSetup
    from folovllm.executor.abstract import Executor

logger = logging.getLogger("folovllm")

DISK_RATE = 1e9  # bytes a second, until some were measured
DRIFT = 0.05  # a disk that is not read is not measured: each time its rate comes so much closer to the first one again
MOST_WRITES = 64  # under way at once
FEWEST_TOKENS = 256  # of a step that tells how fast prompts are computed
FLUSH_SECONDS = 20.0  # at the end


@dataclass(slots=True)
class PendingLoad:
    """A load, as the driver sees it. Block i of it goes through `slots[i]`."""

    transfer: Transfer
    hashes: list[int]
    slots: list[Slot]
    version: bytes
    ranks_left: int  # that are not done
    failed: set[int] = field(default_factory=set)  # blocks that some rank could not read
    is_cancelled: bool = False


class OffloadConnector(KVConnector):
    """The driver's side: it decides what is kept, brought back and forgotten, and tells all ranks the same (`BlockStore`).

    A block in host memory is found by the hash that it had in the prefix cache: both end with this process, and both forget when weights
    change. A file may be read by another engine, so its name is a `block_key`.
    """

    def __init__(self, setup: EngineSetup, executor: Executor, kv: PrefixCachingBlockManager) -> None:
        """Raises ValueError where memory or folder is not available."""
        config, self._kv, self._executor, self.events = setup.config, kv, executor, kv.events
        self._num_ranks = config.tensor_parallel_size
        self._folder = None if config.kv_offload_dir is None else private_folder(Path(config.kv_offload_dir))
        size = num_bytes("kv_offload", config.kv_offload)
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > most:
            raise ValueError(f"kv_offload is more than this machine's memory of {most:,} bytes: take less")
        share, folder_bytes = size // self._num_ranks, num_bytes("kv_offload_dir_size", config.kv_offload_dir_size)
        arguments = share, self._folder, folder_bytes // self._num_ranks, self._num_ranks
        made = executor.collective_rpc(register_kv_caches, *arguments)
        slots, rooms, sizes, rates = zip(*made, strict=True)
        self._host, self._room, self._block_bytes = HostIndex(min(slots)), min(rooms), sum(sizes)
        self._model, self._dtype = model_digest(setup), kv_dtype(setup)
        self._nonce, self._epoch = os.urandom(8), 0  # of weights that no file describes
        self._meta = ConnectorMetadata()
        self._evicted: list[tuple[int, int, bytes]] = []  # id, hash and tokens of blocks that the next step overwrites
        self._writes: list[BlockFile] = []  # which the ranks are told next
        self._found: list[tuple[int, bytes]] = []  # hashes and tokens of the blocks that were asked about last
        self._loads: dict[int, PendingLoad] = {}  # by seq_id
        self._coming = set[int]()  # hashes of the blocks in these loads
        self._writing: dict[bytes, Slot] = {}  # by key
        self._written: Counter[bytes] = Counter()  # how many ranks are done with one of these
        self.rates, self.compute_rate = {"host": sum(rates), "disk": DISK_RATE}, 0.0

    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int | None:
        """The tokens of the blocks that are worth bringing, all of them in the store now."""
        size, names = self._kv.block_size, self._kv.prefix_cache.names(seq)
        first, last = num_computed_tokens // size, (seq.num_tokens - 1) // size
        hashes, token_ids = names.hashes[first:last], names.tokens[first:last]
        if not self._coming.isdisjoint(hashes):  # for another request, and one transfer serves both
            return None
        places: list[str | None] = [None] * first
        for hash_, tokens in zip(hashes, token_ids, strict=True):
            if (slot := self._host.get(hash_)) is not None:
                if slot.token_ids != tokens:
                    break
                places.append("host")
            elif self._has_file(hash_):
                places.append("disk")
            else:
                break
        self._found = list(zip(hashes, token_ids, strict=True))
        rate = self.compute_rate or 1.0  # not known: whatever there is, is worth it
        blocks = blocks_to_load(places, first, self._block_bytes, size, self.rates, rate)
        if not blocks:
            self.rates["disk"] += DRIFT * (DISK_RATE - self.rates["disk"])
        return len(blocks) * size

    def update_state_after_alloc(self, seq: Sequence, block_ids: list[int], num_external_tokens: int) -> None:
        """Plan the load of these blocks. What is on disk needs a slot first: if there is none, fewer come."""
        slots, files = list[Slot](), dict[int, BlockFile]()
        for hash_, token_ids in self._found[: len(block_ids)]:
            if (slot := self._host.get(hash_)) is None:
                slot = self._put(hash_, token_ids) if self._has_file(hash_) else None
                if slot is None:
                    break
                files[len(slots)] = BlockFile(slot.number, self._key(hash_), token_ids)
            self._host.hold(slot)
            slots.append(slot)
        hashes = [hash_ for hash_, _ in self._found[: len(slots)]]
        for hash_ in reversed(hashes):
            self._host.move_to_end(hash_)  # the end of a prefix is of no use without its beginning, and goes first
        self._coming.update(hashes)
        transfer = Transfer([slot.number for slot in slots], block_ids[: len(slots)], files)
        self._loads[seq.seq_id] = PendingLoad(transfer, hashes, slots, self._version(), self._num_ranks)
        self._meta.loads[seq.seq_id] = transfer

    def block_evicted(self, block: Block) -> None:
        """Note the block: before the coming step it is kept in host memory."""
        assert block.hash is not None
        self._evicted.append((block.block_id, block.hash, block.token_ids))

    def build_connector_meta(self, output: SchedulerOutput) -> None:
        """Send what was planned to all ranks. While they load, find places for what they have gathered."""
        while len(self._evicted) > self._room:
            first, self._evicted = self._evicted[: self._room], self._evicted[self._room :]
            gather = ConnectorMetadata([block_id for block_id, _, _ in first])
            self._executor.collective_rpc(on_store, "start_load_kv", gather)
            self._keep(first)
        last, self._evicted = self._evicted, []
        self._meta.evicted = [block_id for block_id, _, _ in last]
        if self._meta != ConnectorMetadata():
            meta, self._meta = self._meta, ConnectorMetadata()
            self._executor.collective_rpc(on_store, "start_load_kv", meta)
        if last or self._writes:
            self._keep(last)

    def get_finished(self) -> Mapping[int, int]:
        """Ask the ranks, if something is under way there."""
        received: dict[int, int] = {}
        if self._loads or self._writing:
            for report in self._executor.collective_rpc(on_store, "get_finished"):
                received |= self._process_report(report)
        return received

    def request_finished(self, seq: Sequence, block_ids: list[int]) -> None:
        """If the blocks are being filled, let no later step see it: it begins after the copy, or there is none."""
        if (load := self._loads.get(seq.seq_id)) is not None:
            load.is_cancelled = True
            self._meta.cancelled.append(seq.seq_id)
            self.build_connector_meta(SchedulerOutput())

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A large step tells how fast prompts are computed."""
        if num_tokens >= FEWEST_TOKENS and seconds > 0:
            rate = num_tokens / seconds
            self.compute_rate = 0.7 * self.compute_rate + 0.3 * rate if self.compute_rate else rate

    def reset(self) -> None:
        """Forget the host's blocks, and let no file be found: they may be of other weights from here on."""
        self._epoch += 1
        for hash_ in list(self._host):
            self._host.drop(hash_)
        self._evicted.clear()

    def close(self) -> None:
        """Write what has no file yet, as far as time allows, so that the next start finds it."""
        with suppress(RuntimeError):  # a rank that died has nothing to write
            if self._folder is not None and not self._version():
                self._flush(time.monotonic() + FLUSH_SECONDS)
            self._executor.collective_rpc(on_store, "close")

    # --- what is where ---

    def _version(self) -> bytes:
        """Which weights the model has: b"" for those of its files; later ones have no name outside of this process."""
        generation = self._kv.prefix_cache.root(None)
        if not generation and not self._epoch:
            return b""
        return self._nonce + self._epoch.to_bytes(8, "little") + generation.to_bytes(8, "little")

    def _key(self, block_hash: int) -> bytes:
        return block_key(block_hash, self._model, self._version(), self._dtype, self._kv.block_size)

    def _has_file(self, block_hash: int) -> bool:
        """Whether a block is on disk. The first rank's file speaks for all: what another rank lacks is found out when it is read."""
        return self._folder is not None and os.path.exists(file_of(self._folder, self._key(block_hash)))

    def _put(self, hash_: int, token_ids: bytes) -> Slot | None:
        """A slot for a block, for which another one may have to go; None if transfers hold all."""
        slot, evicted = self._host.put(hash_, token_ids)
        if evicted is not None and self.events.on and not self._has_file(evicted):
            self._report("lost", "host", 1)
        return slot

    def _keep(self, evicted: list[tuple[int, int, bytes]]) -> None:
        """Give blocks that the ranks have gathered a place in host memory, those that have none, and on disk."""
        numbers = [NOT_KEPT] * len(evicted)  # of two blocks for one slot, the later is copied last
        for i, (_, hash_, token_ids) in enumerate(evicted):
            if (slot := self._host.get(hash_)) is not None:
                self._host.move_to_end(hash_)
            elif (slot := self._put(hash_, token_ids)) is not None:
                numbers[i] = slot.number
            else:
                self._report("lost", "device", 1)
                continue
            self._write(slot)
        self._report("offloaded", "host", len(numbers) - numbers.count(NOT_KEPT))
        writes, self._writes = self._writes, []
        self._executor.collective_rpc(on_store, "save", numbers, writes)

    def _report(self, what: str, place: str, count: int, seq_id: int = -1) -> None:
        if count and self.events.on:
            self.events.emit(BlocksMoved(what, place, count, count * self._block_bytes, seq_id))

    # --- the ends of transfers ---

    def _process_report(self, report: Report) -> dict[int, int]:
        """Note a rank's report. Returns the tokens that have come, by seq_id, of loads that have ended on all ranks."""
        if report.disk_rate:
            self.rates["disk"] = 0.5 * self.rates["disk"] + 0.5 * report.disk_rate * self._num_ranks
        for key in report.written:
            self._written[key] += 1
            if self._written[key] == self._num_ranks:
                del self._written[key]
                self._host.release([self._writing.pop(key)])
                self._report("offloaded", "disk", 1)
        if report.error and self._folder is not None:
            logger.warning("K/V go to the disk no more, and are not read from it: %s", report.error)
            self._folder = None
        received = {}
        for seq_id, failed in report.loads.items():
            load = self._loads[seq_id]
            load.failed |= failed
            load.ranks_left -= 1
            if not load.ranks_left:
                received[seq_id] = self._end_load(seq_id)
        return received

    def _end_load(self, seq_id: int) -> int:
        """Release the slots of a load, and forget what could not be read. Returns the tokens that have come and may be used."""
        load, size = self._loads.pop(seq_id), self._kv.block_size
        table, files = load.transfer.block_ids, load.transfer.files
        self._coming.difference_update(load.hashes)
        for i in load.failed:
            if self._host.get(load.hashes[i]) is load.slots[i]:
                self._host.drop(load.hashes[i])
            if self._folder is not None:
                remove(file_of(self._folder, files[i].key))
        self._host.release(load.slots)
        self._report("lost", "disk", len(load.failed))
        if load.is_cancelled or load.version != self._version():
            return 0
        lost, all_of_it = {table[i] for i in load.failed}, len(table) * size
        num_tokens = requests_to_recompute({seq_id: table}, {seq_id: all_of_it}, lost, size).get(seq_id, all_of_it)
        from_disk = sum(i * size < num_tokens for i in files)
        self._report("loaded", "disk", from_disk, seq_id)
        self._report("loaded", "host", num_tokens // size - from_disk, seq_id)
        return num_tokens

    # --- the disk ---

    def _write(self, slot: Slot) -> None:
        """Have a block written that has no file, if there is a folder and the disk keeps up. Later weights have no files."""
        assert slot.hash is not None
        if self._folder is None or self._version() or len(self._writing) >= MOST_WRITES:
            return
        key = self._key(slot.hash)
        if key not in self._writing and not self._has_file(slot.hash):
            self._host.hold(slot)
            self._writing[key] = slot
            self._writes.append(BlockFile(slot.number, key, slot.token_ids))

    def _flush(self, deadline: float) -> None:
        """Write what has no file: of host memory, then of the device. Some at a time, for a block that is written holds its slot."""
        work: list[Callable[[], None]] = [partial(self._write, slot) for slot in self._host.values()]
        work += [partial(self.block_evicted, block) for block in self._kv.blocks if block.hash is not None]
        for i in range(0, len(work), MOST_WRITES):
            for begin in work[i : i + MOST_WRITES]:
                begin()
            self._settle(deadline)

    def _settle(self, deadline: float) -> None:
        """Send what is planned, and wait until all of it is written."""
        self.build_connector_meta(SchedulerOutput())
        while self._writing and time.monotonic() < deadline:
            self.get_finished()
            time.sleep(0.002)
