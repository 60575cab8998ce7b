"""Offloading: what the prefix cache evicts is kept in host memory, and on disk if asked, and comes back where that is faster than computing it."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folovllm.cache.connector import KVConnector
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.electives.kv_transfer.digest import kv_dtype, model_digest
from folovllm.electives.kv_transfer.disk import file_of, private_folder, remove
from folovllm.electives.kv_transfer.options import num_bytes
from folovllm.electives.kv_transfer.plan import block_key, blocks_to_load, requests_to_recompute
from folovllm.electives.kv_transfer.store import NOT_KEPT, BlockFile, ConnectorMetadata, on_store, register_kv_caches
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
FLUSHED = 64  # blocks at a time, at the end
FEWEST_TOKENS = 256  # of a step that tells how fast prompts are computed
FLUSH_SECONDS = 20.0  # at the end


@dataclass(slots=True, eq=False)
class Slot:
    """A block's place in host memory."""

    number: int
    hash: int | None = None  # of the block in it; None: there is none, or it was forgotten
    token_ids: bytes = b""
    is_loading: bool = False  # to the device, perhaps from a file first: then it gets no other block


class HostIndex(OrderedDict[int, Slot]):
    """All slots, the same on each rank, least recently used first: by the hash of the block, or a number below 0 where there is none."""

    def __init__(self, num_slots: int) -> None:
        super().__init__((-1 - i, Slot(i)) for i in range(num_slots))

    def put(self, hash_: int, token_ids: bytes) -> tuple[Slot | None, int | None]:
        """A slot for a block that is not there, and the hash of the block that must go for it. None if all slots load."""
        key = next((key for key, slot in self.items() if not slot.is_loading), None)
        if key is None:
            return None, None
        slot = self[hash_] = self.pop(key)
        evicted, slot.hash, slot.token_ids = slot.hash, hash_, token_ids
        return slot, evicted

    def drop(self, slot: Slot) -> None:
        """Forget the block in a slot."""
        if slot.hash is not None:
            self[-1 - slot.number] = self.pop(slot.hash)
            self.move_to_end(-1 - slot.number, last=False)
            slot.hash = None


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that a request waits for: first files are read, then all is copied to the cache, up to the first that could not be read."""

    slots: list[Slot]
    block_ids: list[int]  # block i comes from `slots[i]`
    files: dict[int, BlockFile]  # by number, those on disk
    version: bytes | None  # of the weights; None: nobody waits for it any more
    ranks_left: int  # that read, or copy
    failed: set[int] = field(default_factory=set)  # files that some rank could not read
    num_tokens: int = -1  # that come; below 0: files are read


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
        folder_size = num_bytes("kv_offload_dir_size", config.kv_offload_dir_size)
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > most:
            raise ValueError(f"kv_offload is more than this machine's memory of {most:,} bytes: take less")
        made = executor.collective_rpc(register_kv_caches, size, self._folder, folder_size, self._num_ranks)
        slots, rooms, sizes, rates = zip(*made, strict=True)
        self._host, self._room, self._block_bytes = HostIndex(min(slots)), min(rooms), sum(sizes)
        self._model, self._dtype = model_digest(setup), kv_dtype(setup)
        self._epoch = 0  # how often all was forgotten
        self._meta = ConnectorMetadata()
        self._evicted: list[tuple[int, int, bytes]] = []  # id, hash and tokens of blocks that the next step overwrites
        self._files: dict[int, BlockFile] = {}  # by slot, those to write
        self._found: list[tuple[int, bytes]] = []  # hashes and tokens of the blocks that were asked about last
        self._loads: dict[int, Load] = {}  # by seq_id
        self._writing = [0] * self._num_ranks  # files, of each rank
        self.rates, self.compute_rate = {"host": sum(rates), "disk": DISK_RATE}, 0.0

    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int | None:
        """The tokens of the blocks that are worth bringing, all of them in the store now."""
        size, names = self._kv.block_size, self._kv.prefix_cache.names(seq)
        first, last = num_computed_tokens // size, (seq.num_tokens - 1) // size
        self._found = list(zip(names.hashes[first:last], names.tokens[first:last], strict=True))
        places: list[str | None] = [None] * first
        for hash_, token_ids in self._found:
            slot = self._host.get(hash_)
            if slot is not None and slot.is_loading:  # for another request, and one transfer serves both
                return None
            if slot is not None and slot.token_ids == token_ids:
                places.append("host")
            elif slot is None and self._has_file(hash_):
                places.append("disk")
            else:
                break
        rate = self.compute_rate or 1.0  # not known: whatever there is, is worth it
        blocks = blocks_to_load(places, first, self._block_bytes, size, self.rates, rate)
        if not blocks:
            self.rates["disk"] += DRIFT * (DISK_RATE - self.rates["disk"])
        return len(blocks) * size

    def update_state_after_alloc(self, seq: Sequence, block_ids: list[int], num_external_tokens: int) -> None:
        """Plan the load of these blocks. What is on disk needs a slot first: if there is none, fewer come."""
        slots, files = list[Slot](), dict[int, BlockFile]()
        for i, (hash_, token_ids) in enumerate(self._found[: len(block_ids)]):
            if (slot := self._host.get(hash_)) is None:
                slot = self._put(hash_, token_ids) if self._has_file(hash_) else None
                if slot is None:
                    break
                files[i] = BlockFile(slot.number, self._key(hash_), token_ids)
            slot.is_loading = True
            slots.append(slot)
        for hash_, _ in reversed(self._found[: len(slots)]):
            self._host.move_to_end(hash_)  # the end of a prefix is of no use without its beginning, and goes first
        ranks_left = self._num_ranks if files else 0
        self._loads[seq.seq_id] = load = Load(slots, block_ids, files, self._version(), ranks_left)
        if files:
            self._meta.reads[seq.seq_id] = files
        else:
            self._plan_copy(seq.seq_id, load)

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
        if last or self._files:
            self._keep(last)

    def get_finished(self) -> Mapping[int, int]:
        """Ask the ranks, if something is under way there."""
        if not (self._loads or any(self._writing)):
            return {}
        reports = self._executor.collective_rpc(on_store, "get_finished")
        self._report("offloaded", "disk", reports[0].writes.count(""))
        for rank, report in enumerate(reports):
            self._writing[rank] -= len(report.writes)
            if report.disk_rate:
                self.rates["disk"] = 0.5 * self.rates["disk"] + 0.5 * report.disk_rate * self._num_ranks
            for seq_id, failed in report.loads.items():
                self._loads[seq_id].ranks_left -= 1
                self._loads[seq_id].failed |= failed
            for error in filter(None, report.writes):
                if self._folder is not None:
                    logger.warning("K/V go to the disk no more, and are not read from it: %s", error)
                    self._folder = None
        for seq_id, load in self._loads.items():
            if not load.ranks_left and load.num_tokens < 0:
                self._plan_copy(seq_id, load)
        ended = [seq_id for seq_id, load in self._loads.items() if not load.ranks_left]
        return {seq_id: self._end_load(seq_id, self._loads.pop(seq_id)) for seq_id in ended}

    def request_finished(self, seq: Sequence, block_ids: list[int]) -> None:
        """If a load still fills the blocks, make later steps wait for its copy; a copy that has not begun is dropped."""
        if (load := self._loads.get(seq.seq_id)) is not None:
            load.version = None
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
        for slot in list(self._host.values()):
            self._host.drop(slot)
        self._evicted.clear()

    def close(self) -> None:
        """Write what has no file yet, as far as time allows, so that the next start finds it."""
        with suppress(RuntimeError):  # a rank that died has nothing to write
            if self._folder is not None and not self._version():
                self._flush()
            self._executor.collective_rpc(on_store, "close")

    # --- what is where ---

    def _version(self) -> bytes:
        """Which weights the model has: b"" for those of its files; no file is ever of later ones."""
        generation = self._kv.prefix_cache.root(None)
        return f"{self._epoch} {generation}".encode() if self._epoch or generation else b""

    def _key(self, block_hash: int) -> bytes:
        return block_key(block_hash, self._model, self._version(), self._dtype, self._kv.block_size)

    def _has_file(self, block_hash: int) -> bool:
        """Whether a block is on disk. The first rank's file speaks for all: what another rank lacks is found out when it is read."""
        return self._folder is not None and os.path.exists(file_of(self._folder, self._key(block_hash)))

    def _put(self, hash_: int, token_ids: bytes) -> Slot | None:
        """A slot for a block, for which another one may have to go; None if all of them are loaded from."""
        slot, evicted = self._host.put(hash_, token_ids)
        if slot is not None:
            self._files.pop(slot.number, None)
        if evicted is not None and self.events.on and not self._has_file(evicted):
            self._report("lost", "host", 1)
        return slot

    def _keep(self, evicted: list[tuple[int, int, bytes]]) -> None:
        """Give blocks that the ranks have gathered a place in host memory, those that have none, and on disk."""
        numbers = [NOT_KEPT] * len(evicted)  # of two blocks for one slot, the later is copied last
        for i, (_, hash_, token_ids) in enumerate(evicted):
            if hash_ in self._host:
                self._host.move_to_end(hash_)
            elif (slot := self._put(hash_, token_ids)) is not None:
                numbers[i] = slot.number
                self._plan_write(slot)
            else:
                self._report("lost", "device", 1)
        self._report("offloaded", "host", len(numbers) - numbers.count(NOT_KEPT))
        files, self._files = list(self._files.values()), {}
        self._writing = [count + len(files) for count in self._writing]
        self._executor.collective_rpc(on_store, "save", numbers, files)

    def _plan_write(self, slot: Slot) -> None:
        """Have a block written that has no file, if there is a folder. Later weights have no files."""
        assert slot.hash is not None
        if self._folder is not None and not self._version() and not self._has_file(slot.hash):
            self._files[slot.number] = BlockFile(slot.number, self._key(slot.hash), slot.token_ids)

    def _report(self, what: str, place: str, count: int, seq_id: int = -1) -> None:
        if count and self.events.on:
            self.events.emit(BlocksMoved(what, place, count, count * self._block_bytes, seq_id))

    # --- loads ---

    def _plan_copy(self, seq_id: int, load: Load) -> None:
        """Plan the copy to the cache of what is in host memory now: nothing, if nobody waits for it, or weights have changed."""
        table, whole, size = load.block_ids, len(load.slots) * self._kv.block_size, self._kv.block_size
        lost = [table[i] for i in load.failed]
        load.num_tokens = requests_to_recompute({seq_id: table}, {seq_id: whole}, lost, size).get(seq_id, whole)
        count = load.num_tokens // size
        if count and load.version == self._version():
            load.ranks_left = self._num_ranks
            self._meta.loads[seq_id] = [slot.number for slot in load.slots[:count]], table[:count]

    def _end_load(self, seq_id: int, load: Load) -> int:
        """Release the slots of a load, and forget what could not be read. Returns the tokens that have come and may be used."""
        for slot in load.slots:
            slot.is_loading = False
        for i in load.failed:
            self._host.drop(load.slots[i])
            if self._folder is not None:
                remove(file_of(self._folder, load.files[i].key))
        self._report("lost", "disk", len(load.failed))
        if load.version != self._version():
            return 0
        count = load.num_tokens // self._kv.block_size
        from_disk = sum(i < count for i in load.files)
        self._report("loaded", "disk", from_disk, seq_id)
        self._report("loaded", "host", count - from_disk, seq_id)
        return load.num_tokens

    # --- the end ---

    def _flush(self) -> None:
        """Write what has no file: of host memory, then of the device. Some at a time, for a block is written from its slot."""
        deadline = time.monotonic() + FLUSH_SECONDS
        self._settle(deadline)
        kept: list[Any] = [*self._host.values(), *self._kv.blocks]
        work, step = [each for each in kept if each.hash is not None], min(FLUSHED, len(self._host))
        for i in range(0, len(work), step):
            if any(self._writing):
                return  # time is up; a block that waits for its turn must not be written a second time
            for each in work[i : i + step]:
                self._plan_write(each) if isinstance(each, Slot) else self.block_evicted(each)
            self._settle(deadline)

    def _settle(self, deadline: float) -> None:
        """Send what is planned, and wait until no file is written."""
        self.build_connector_meta(SchedulerOutput())
        while any(self._writing) and time.monotonic() < deadline:
            self.get_finished()
            time.sleep(0.002)
