"""Offloading: what the prefix cache evicts is kept in host memory, and on disk if asked, and comes back where that is faster than computing it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from folovllm.cache.connector import Finished, KVConnector
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.electives.kv_transfer.digest import model_digest
from folovllm.electives.kv_transfer.disk import own_folder, stored_keys
from folovllm.electives.kv_transfer.index import HostIndex
from folovllm.electives.kv_transfer.options import num_bytes
from folovllm.electives.kv_transfer.plan import block_key, blocks_to_load, requests_to_recompute
from folovllm.electives.kv_transfer.store import Meta, Piece, Report, on_store, register_kv_caches
from folovllm.engine.events import BlocksMoved
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput

if TYPE_CHECKING:
    from folovllm.cache.block_manager import Block
    from folovllm.engine.setup import EngineSetup
    from folovllm.executor.abstract import Executor

logger = logging.getLogger("folovllm")

RATES = {"host": 20e9, "disk": 1e9}  # bytes a second, until some were measured
HOPE = 0.05  # what is not used is not measured: each time its rate comes so much closer to the first one again
MOST_WRITES = 64  # under way at once
FEWEST_TOKENS = 256  # of a step that tells how fast prompts are computed
KNOWN_KEYS = 1 << 16
FLUSH_SECONDS = 20.0  # at the end


@dataclass(slots=True)
class Coming:
    """A load, as the driver sees it."""

    pieces: list[Piece]
    version: bytes
    ranks_left: int  # that are not done
    failed: set[int] = field(default_factory=set)  # places in `pieces` that some rank could not read
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
        if self._folder is not None and self._disk_size < self._block_bytes:
            raise ValueError(f"kv_offload_dir_size holds no block: a block has {self._block_bytes:,} bytes")
        for key, size in () if self._folder is None else stored_keys(self._folder, self._num_ranks):
            self._remember(key, size)
        dtype = str(setup.attention.kv_dtype or setup.dtype)
        make_key = partial(block_key, model=model_digest(setup), dtype=dtype, block_size=setup.block_size)
        self._make_key = lru_cache(KNOWN_KEYS)(make_key)  # a long prompt is asked about more than once
        self._nonce, self._epoch = os.urandom(8), 0  # of weights that no file describes
        self._meta = Meta()
        self._promised: list[tuple[bytes, bytes]] = []  # keys and tokens of the blocks that were asked about last
        self._loads: dict[int, Coming] = {}  # by seq_id
        self._on_way: set[bytes] = set()  # keys of the blocks that loads bring
        self._empty: list[int] = []  # seq_ids of which nothing can come after all
        self._unwritten: deque[bytes] = deque()
        self._writing: dict[bytes, list[int]] = {}  # by key: ranks that are not done, and the slot
        self._first_rates = RATES | {"host": sum(rate.get("host", RATES["host"]) for rate in rates)}
        self.rates, self.compute_rate = dict(self._first_rates), 0.0
        self._counts: Counter[str] = Counter()

    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int | None:
        """The tokens of the blocks that are worth bringing, all of them in the store now."""
        size = self._kv.block_size
        first, last = num_computed_tokens // size, (seq.num_tokens - 1) // size
        if last <= first:
            return 0
        places: list[str | None] = [None] * first
        self._promised = []
        for key, token_ids in self._names(seq, first, last):
            if (place := self._place(key, token_ids)) is None:
                break
            if place == "coming":  # for another request, and one transfer serves both
                return None
            places.append(place)
            self._promised.append((key, token_ids))
        rate = self.compute_rate or 1.0  # not known: whatever there is, is worth it
        blocks = blocks_to_load(places, first, self._block_bytes, size, self.rates, rate)
        if not blocks:
            self._hope()
        return len(blocks) * size

    def update_state_after_alloc(self, seq: Sequence, block_ids: list[int], num_external_tokens: int) -> None:
        """Plan the load of these blocks. To make room for them may have taken some of them out of the store: then fewer come."""
        pieces = list[Piece]()
        for (key, token_ids), block_id in zip(self._promised, block_ids, strict=False):
            piece = self._piece(key, token_ids, block_id)
            if piece is None:
                break
            self._host.hold(piece.slot)
            self._on_way.add(key)
            pieces.append(piece)
        if not pieces:
            self._empty.append(seq.seq_id)
            return
        self._meta.loads[seq.seq_id] = pieces
        self._loads[seq.seq_id] = Coming(pieces, self._version(), self._num_ranks)

    def block_evicted(self, block: Block) -> None:
        """Keep the block in host memory, if it is not there."""
        assert block.hash is not None
        key = self._key(block.hash)
        if self._host.get(key) is not None:
            return
        entry, gone = self._host.put(key, block.token_ids)
        if gone is not None and gone not in self._disk:
            self._moved("lost", "host", 1)
        if entry is None:
            self._moved("lost", "device", 1)
            return
        entry.is_on_disk = key in self._disk
        self._meta.saves[entry.slot] = Piece(entry.slot, block.block_id, key, block.token_ids)
        if self._folder is not None and not entry.is_on_disk and not self._version():
            self._unwritten.append(key)
        self._moved("offloaded", "host", 1)

    def build_connector_meta(self, output: SchedulerOutput) -> None:
        """Send what was planned to all ranks."""
        self._plan_writes(MOST_WRITES)
        if self._meta:
            meta, self._meta = self._meta, Meta()
            self._executor.collective_rpc(on_store, "start_load_kv", meta)

    def get_finished(self) -> Finished:
        """Ask the ranks, if something is under way there."""
        received = dict.fromkeys(self._empty, 0)
        self._empty.clear()
        if self._loads or self._writing:
            for report in self._executor.collective_rpc(on_store, "get_finished"):
                received |= self._take_in(report)
        return (), received

    def request_finished(self, seq: Sequence, block_ids: list[int]) -> None:
        """If the blocks are being filled, let no later step see it: it begins after the copy, or there is none."""
        if seq.seq_id in self._empty:
            self._empty.remove(seq.seq_id)
        if (load := self._loads.get(seq.seq_id)) is None:
            return
        load.is_cancelled = True
        if self._meta.loads.pop(seq.seq_id, None) is None:
            self._executor.collective_rpc(on_store, "start_load_kv", Meta(cancelled=[seq.seq_id]))
            return
        self._end_load(seq.seq_id)  # nobody was told yet
        for piece in load.pieces:
            if piece.on_disk:  # it was never read
                self._host.drop(piece.key)

    def observe_step(self, num_tokens: int, seconds: float) -> None:
        """A large step tells how fast prompts are computed."""
        if num_tokens >= FEWEST_TOKENS and seconds > 0:
            rate = num_tokens / seconds
            self.compute_rate = 0.7 * self.compute_rate + 0.3 * rate if self.compute_rate else rate

    def reset(self) -> None:
        """Forget the host's blocks, and let no file be found: they may be of other weights from here on."""
        self._epoch += 1
        self._host.clear()
        self._meta.saves.clear()
        self._unwritten.clear()

    def counters(self) -> Mapping[str, float]:
        return self._counts

    def close(self) -> None:
        """Write what has no file yet, as far as time allows, so that the next start finds it."""
        with suppress(RuntimeError):  # a rank that died has nothing to write
            if self._folder is not None and not self._version():
                self._flush(time.monotonic() + FLUSH_SECONDS)
            self._executor.collective_rpc(on_store, "close")

    def _hope(self) -> None:
        for place, first in self._first_rates.items():
            self.rates[place] += HOPE * (first - self.rates[place])

    # --- names ---

    def _version(self) -> bytes:
        """Which weights the model has: b"" for those of its files; later ones have no name outside of this process."""
        generation = self._kv.prefix_cache.root(None)
        if not generation and not self._epoch:
            return b""
        return self._nonce + self._epoch.to_bytes(8, "little") + generation.to_bytes(8, "little")

    def _key(self, block_hash: int) -> bytes:
        return self._make_key(block_hash, version=self._version())

    def _names(self, seq: Sequence, first: int, last: int) -> Iterator[tuple[bytes, bytes]]:
        """Keys and tokens of blocks `first` to `last` of a sequence. Most prompts are nowhere: their first key is the only one made."""
        names = self._kv.prefix_cache.names(seq)
        pairs = zip(names.hashes[first:last], names.tokens[first:last], strict=True)
        return ((self._key(hash_), token_ids) for hash_, token_ids in pairs)

    def _place(self, key: bytes, token_ids: bytes) -> str | None:
        if key in self._on_way:
            return "coming"
        if (entry := self._host.get(key)) is not None:
            return "host" if entry.token_ids == token_ids else None
        return "disk" if key in self._disk else None

    def _piece(self, key: bytes, token_ids: bytes, block_id: int) -> Piece | None:
        """A block on its way to the device, by a slot in host memory; None if it is nowhere, or there is no slot."""
        place = self._place(key, token_ids)
        if place == "disk":
            entry, _ = self._host.put(key, token_ids)
            if entry is not None:
                entry.is_on_disk = True
                self._disk.move_to_end(key)
        else:
            entry = self._host.get(key) if place == "host" else None
        return None if entry is None else Piece(entry.slot, block_id, key, token_ids, place == "disk")

    # --- the ends of transfers ---

    def _take_in(self, report: Report) -> dict[int, int]:
        """Note a rank's report. Returns the tokens that have come, by seq_id, of loads that have ended on all ranks."""
        for place, rate in report.rates.items():
            self.rates[place] = 0.5 * self.rates[place] + 0.5 * rate * self._num_ranks
        for key in report.written:
            self._writing[key][0] -= 1
            if not self._writing[key][0]:
                self._host.release(self._writing.pop(key)[1])
                self._moved("offloaded", "disk", 1)
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
        for i, piece in enumerate(load.pieces):
            self._host.release(piece.slot)
            self._on_way.discard(piece.key)
            if i in load.failed:
                self._host.drop(piece.key)
                self._forget(piece.key)
        self._moved("lost", "disk", len(load.failed))
        if load.is_cancelled or load.version != self._version():
            return 0
        table = [piece.block_id for piece in load.pieces]
        lost, all_of_it = {table[i] for i in load.failed}, len(table) * size
        count = requests_to_recompute({seq_id: table}, {seq_id: all_of_it}, lost, size).get(seq_id, all_of_it)
        came = load.pieces[: count // size]
        from_disk = sum(piece.on_disk for piece in came)
        self._moved("loaded", "disk", from_disk, seq_id)
        self._moved("loaded", "host", len(came) - from_disk, seq_id)
        return count

    def _moved(self, what: str, place: str, count: int, seq_id: int = -1) -> None:
        if count:
            self._counts[f"{what}_{place}"] += count
            if self.events.on:
                self.events.emit(BlocksMoved(what, place, count, count * self._block_bytes, seq_id))

    # --- the disk ---

    def _plan_writes(self, most: int) -> None:
        """Have blocks written that are in host memory alone, oldest first."""
        while self._unwritten and len(self._writing) < most:
            key = self._unwritten.popleft()
            if (entry := self._host.get(key)) is None or entry.is_on_disk or key in self._writing:
                continue
            self._make_room(self._block_bytes)
            self._remember(key, self._block_bytes)
            entry.is_on_disk = True
            self._host.hold(entry.slot)
            self._writing[key] = [self._num_ranks, entry.slot]
            self._meta.writes.append(Piece(entry.slot, -1, key, entry.token_ids))

    def _remember(self, key: bytes, size: int) -> None:
        self._disk[key] = size
        self._disk_used += size

    def _forget(self, key: bytes) -> None:
        self._disk_used -= self._disk.pop(key, 0)

    def _make_room(self, size: int) -> None:
        """Remove the oldest files until `size` bytes more fit. What is being written stays."""
        while self._disk_used + size > self._disk_size:
            oldest = next((key for key in self._disk if key not in self._writing), None)
            if oldest is None:
                return
            self._forget(oldest)
            self._meta.removed.append(oldest)
            if (entry := self._host.get(oldest)) is not None:
                entry.is_on_disk = False
            self._moved("lost", "disk", 1)

    def _give_disk_up(self, error: str) -> None:
        if self._folder is not None:
            logger.warning("K/V go to the disk no more, and are not read from it: %s", error)
        self._folder = None
        self._unwritten.clear()
        self._disk.clear()

    def _flush(self, deadline: float) -> None:
        """Offload what only the device has; now and then wait for the disk, for all slots may be held."""
        for block in self._kv.blocks:
            if block.hash is None or self._key(block.hash) in self._disk or time.monotonic() > deadline:
                continue
            self.block_evicted(block)
            if len(self._meta.saves) >= MOST_WRITES:
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
