"""Offloading: what the prefix cache evicts is kept in host memory, and on disk if asked, and comes back where that is faster than computing it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from folovllm.cache.connector import KVConnector
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.electives.kv_transfer.digest import model_digest
from folovllm.electives.kv_transfer.disk import own_folder, stored_keys
from folovllm.electives.kv_transfer.index import Entry, HostIndex
from folovllm.electives.kv_transfer.options import num_bytes
from folovllm.electives.kv_transfer.plan import block_key, blocks_to_load, requests_to_recompute
from folovllm.electives.kv_transfer.store import ConnectorMetadata, Report, Transfer, on_store, register_kv_caches
from folovllm.engine.events import BlocksMoved
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput

if TYPE_CHECKING:
    from folovllm.cache.block_manager import Block
    from folovllm.engine.setup import EngineSetup
    from folovllm.executor.abstract import Executor

logger = logging.getLogger("folovllm")

RATES = {"host": 20e9, "disk": 1e9}  # bytes a second, until some were measured
DRIFT = 0.05  # what is not used is not measured: each time its rate comes so much closer to the first one again
MOST_WRITES = 64  # under way at once
FEWEST_TOKENS = 256  # of a step that tells how fast prompts are computed
KNOWN_KEYS = 1 << 16
FLUSH_SECONDS = 20.0  # at the end


@dataclass(slots=True)
class PendingLoad:
    """A load, as the driver sees it."""

    transfers: list[Transfer]
    entries: list[Entry]  # whose slots it holds
    version: bytes
    ranks_left: int  # that are not done
    failed: set[int] = field(default_factory=set)  # places in `transfers` that some rank could not read
    is_cancelled: bool = False


class OffloadConnector(KVConnector):
    """The driver's side: it decides what is kept, brought back and forgotten, and tells all ranks the same (`BlockStore`)."""

    def __init__(self, setup: EngineSetup, executor: Executor, kv: PrefixCachingBlockManager) -> None:
        """Raises ValueError where memory or folder cannot be had."""
        config, self._kv, self._executor = setup.config, kv, executor
        self.events = kv.events
        self._num_ranks = config.tensor_parallel_size
        self._folder = None if config.kv_offload_dir is None else own_folder(Path(config.kv_offload_dir))
        size, most = (
            num_bytes("kv_offload", config.kv_offload),
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )
        if size > most:
            raise ValueError(f"kv_offload is more than this machine's memory of {most:,} bytes: take less")
        share = size // self._num_ranks
        made = executor.collective_rpc(register_kv_caches, share, self._folder, self._num_ranks)
        slots, sizes, rates = zip(*made, strict=True)
        self._host, self._block_bytes = HostIndex(min(slots)), sum(sizes)
        self._disk: OrderedDict[bytes, int] = OrderedDict()  # bytes of all files of a block, by key; the oldest first
        self._disk_size, self._disk_used = num_bytes("kv_offload_dir_size", config.kv_offload_dir_size), 0
        for key, size in () if self._folder is None else stored_keys(self._folder, self._num_ranks):
            self._remember(key, size)
        model, dtype, block_size = model_digest(setup), str(setup.attention.kv_dtype or setup.dtype), setup.block_size
        self._key = lru_cache(KNOWN_KEYS)(  # a long prompt is asked about more than once
            lambda block_hash, version: block_key(block_hash, model, version, dtype, block_size)
        )
        self._nonce, self._epoch = os.urandom(8), 0  # of weights that no file describes
        self._meta = ConnectorMetadata()
        self._evicted: list[tuple[int, int, bytes]] = []  # id, hash and tokens of blocks that the next step overwrites
        self._promised: list[tuple[bytes, bytes]] = []  # keys and tokens of the blocks that were asked about last
        self._loads: dict[int, PendingLoad] = {}  # by seq_id
        self._on_way: set[bytes] = set()  # keys of the blocks that loads bring
        self._unwritten: deque[bytes] = deque()
        self._writing: dict[bytes, Entry] = {}  # by key
        self._written: Counter[bytes] = Counter()  # how many ranks are done with one of these
        self._first_rates = RATES | {"host": sum(rate.get("host", RATES["host"]) for rate in rates)}
        self.rates, self.compute_rate = dict(self._first_rates), 0.0

    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int | None:
        """The tokens of the blocks that are worth bringing, all of them in the store now."""
        size = self._kv.block_size
        first, last = num_computed_tokens // size, (seq.num_tokens - 1) // size
        places: list[str | None] = [None] * first
        self._promised = []
        for key, token_ids in self._block_keys(seq, first, last):
            if key in self._on_way:  # for another request, and one transfer serves both
                return None
            if (entry := self._host.get(key)) is not None and entry.token_ids == token_ids:
                places.append("host")
            elif entry is None and key in self._disk:
                places.append("disk")
            else:
                break
            self._promised.append((key, token_ids))
        rate = self.compute_rate or 1.0  # not known: whatever there is, is worth it
        blocks = blocks_to_load(places, first, self._block_bytes, size, self.rates, rate)
        if not blocks:
            for place, first_rate in self._first_rates.items():
                self.rates[place] += DRIFT * (first_rate - self.rates[place])
        return len(blocks) * size

    def update_state_after_alloc(self, seq: Sequence, block_ids: list[int], num_external_tokens: int) -> None:
        """Plan the load of these blocks. What is on disk needs a slot first: if there is none, fewer come."""
        load = self._loads[seq.seq_id] = PendingLoad([], [], self._version(), self._num_ranks)
        for (key, token_ids), block_id in zip(self._promised, block_ids, strict=False):
            if from_disk := (entry := self._host.get(key)) is None:
                entry = self._put(key, token_ids) if key in self._disk else None
            if entry is None:
                break
            if from_disk:
                self._disk.move_to_end(key)
            self._host.hold(entry)
            self._on_way.add(key)
            load.entries.append(entry)
            load.transfers.append(Transfer(entry.slot, block_id, key, token_ids, from_disk))
        self._meta.loads[seq.seq_id] = load.transfers

    def block_evicted(self, block: Block) -> None:
        """Note the block: before the coming step it is kept in host memory."""
        assert block.hash is not None
        self._evicted.append((block.block_id, block.hash, block.token_ids))

    def build_connector_meta(self, output: SchedulerOutput) -> None:
        """Send what was planned to all ranks."""
        if self._evicted:
            self._keep_evicted()
        self._plan_writes()
        if self._meta != ConnectorMetadata():
            meta, self._meta = self._meta, ConnectorMetadata()
            self._executor.collective_rpc(on_store, "start_load_kv", meta)

    def get_finished(self) -> Mapping[int, int]:
        """Ask the ranks, if something is under way there."""
        received: dict[int, int] = {}
        if self._loads or self._writing:
            for report in self._executor.collective_rpc(on_store, "get_finished"):
                received |= self._take_in(report)
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
        self._host.clear()
        self._evicted.clear()
        self._unwritten.clear()

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

    def _block_keys(self, seq: Sequence, first: int, last: int) -> Iterator[tuple[bytes, bytes]]:
        """Keys and tokens of blocks `first` to `last` of a sequence. Most prompts are nowhere: their first key is the only one made."""
        names, version = self._kv.prefix_cache.names(seq), self._version()
        pairs = zip(names.hashes[first:last], names.tokens[first:last], strict=True)
        return ((self._key(hash_, version), token_ids) for hash_, token_ids in pairs)

    def _put(self, key: bytes, token_ids: bytes) -> Entry | None:
        """A slot for a block, for which another one may have to go; None if transfers hold all."""
        entry, gone = self._host.put(key, token_ids)
        if gone is not None and gone not in self._disk:
            self._report("lost", "host", 1)
        return entry

    def _keep_evicted(self) -> None:
        """Give the blocks that are about to be overwritten a place in host memory, those that have none."""
        version, count = self._version(), 0
        for block_id, hash_, token_ids in self._evicted:
            key = self._key(hash_, version)
            if self._host.get(key) is not None:
                continue
            if (entry := self._put(key, token_ids)) is None:
                self._report("lost", "device", 1)
                continue
            count += 1
            self._meta.saves[entry.slot] = Transfer(entry.slot, block_id, key, token_ids)
            if self._folder is not None and not version and key not in self._disk:
                self._unwritten.append(key)
        self._report("offloaded", "host", count)
        self._evicted.clear()

    def _report(self, what: str, place: str, count: int, seq_id: int = -1) -> None:
        if count and self.events.on:
            self.events.emit(BlocksMoved(what, place, count, count * self._block_bytes, seq_id))

    # --- the ends of transfers ---

    def _take_in(self, report: Report) -> dict[int, int]:
        """Note a rank's report. Returns the tokens that have come, by seq_id, of loads that have ended on all ranks."""
        for place, rate in report.rates.items():
            self.rates[place] = 0.5 * self.rates[place] + 0.5 * rate * self._num_ranks
        for key in report.written:
            self._written[key] += 1
            if self._written[key] == self._num_ranks:
                del self._written[key]
                self._host.release(self._writing.pop(key))
                self._report("offloaded", "disk", 1)
        if report.error:
            self._give_disk_up(report.error)
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
        for entry in load.entries:
            self._host.release(entry)
            self._on_way.discard(entry.key)
        for i in load.failed:
            self._host.drop(load.entries[i].key)
            self._forget(load.entries[i].key)
        self._report("lost", "disk", len(load.failed))
        if load.is_cancelled or load.version != self._version():
            return 0
        table = [each.block_id for each in load.transfers]
        lost, all_of_it = {table[i] for i in load.failed}, len(table) * size
        count = requests_to_recompute({seq_id: table}, {seq_id: all_of_it}, lost, size).get(seq_id, all_of_it)
        came = load.transfers[: count // size]
        from_disk = sum(each.from_disk for each in came)
        self._report("loaded", "disk", from_disk, seq_id)
        self._report("loaded", "host", len(came) - from_disk, seq_id)
        return count

    # --- the disk ---

    def _plan_writes(self) -> None:
        """Have blocks written that are in host memory alone, oldest first."""
        while self._unwritten and len(self._writing) < MOST_WRITES:
            key = self._unwritten.popleft()
            if (entry := self._host.get(key)) is None or key in self._disk or key in self._writing:
                continue
            self._make_room()
            self._remember(key, self._block_bytes)
            self._host.hold(entry)
            self._writing[key] = entry
            self._meta.writes.append(Transfer(entry.slot, -1, key, entry.token_ids))

    def _remember(self, key: bytes, size: int) -> None:
        self._disk[key] = size
        self._disk_used += size

    def _forget(self, key: bytes) -> None:
        self._disk_used -= self._disk.pop(key, 0)

    def _make_room(self) -> None:
        """Remove the oldest files until one more fits. What is being written stays."""
        while self._disk_used + self._block_bytes > self._disk_size:
            oldest = next((key for key in self._disk if key not in self._writing), None)
            if oldest is None:
                return
            self._forget(oldest)
            self._meta.removed.append(oldest)
            self._report("lost", "disk", 1)

    def _give_disk_up(self, error: str) -> None:
        if self._folder is not None:
            logger.warning("K/V go to the disk no more, and are not read from it: %s", error)
        self._folder = None
        self._unwritten.clear()
        self._disk.clear()

    def _flush(self, deadline: float) -> None:
        """Offload what only the device has; now and then wait for the disk, for all slots may be held."""
        version = self._version()
        for block in self._kv.blocks:
            if block.hash is None or self._key(block.hash, version) in self._disk or time.monotonic() > deadline:
                continue
            self.block_evicted(block)
            if len(self._evicted) >= MOST_WRITES:
                self._settle(deadline)
        self._settle(deadline)

    def _settle(self, deadline: float) -> None:
        """Have all written that is planned."""
        while time.monotonic() < deadline:
            self.build_connector_meta(SchedulerOutput())
            self.get_finished()
            if not (self._unwritten or self._writing):
                return
            time.sleep(0.002)
