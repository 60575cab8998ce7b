"""x5.4 and x5.5: snapshots of states, by whom they are found, and which of them goes; then all of it in an engine."""

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from folovllm.apps.inspector import lines
from folovllm.apps.inspector.lines import parse
from folovllm.apps.inspector.recorder import Recorder
from folovllm.cache.block_manager import Block
from folovllm.electives.hybrid.snapshots import Snapshot, SnapshotBlockManager, SnapshotCache, snapshot_to_evict
from folovllm.electives.hybrid.state_layer import num_snapshots
from folovllm.engine import events as ev
from folovllm.request import SequenceStatus
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts
from tests.sequences import make_seq
from tests.tiny import worked_case
from tests.workloads import Request, Workload, answered, make_engine, serve
from tests.x5.checkpoints import hybrid_checkpoint


def blocks(*serials: int) -> list[Block]:
    """Cached blocks with these names."""
    return [Block(i, serial=serial) for i, serial in enumerate(serials)]


class TestFinding:
    def test_a_worked_case(self) -> None:
        """Four blocks are cached; the second and the third have a snapshot."""
        cache = SnapshotCache(3)
        for serial in (12, 13):
            cache.cache_snapshot(_taken(cache), 4 * (serial - 10), serial)
        cache.clock = 7
        found, snapshot = cache.longest_prefix(blocks(11, 12, 13, 14))
        got = {
            "blocks": [block.serial for block in found],
            "tokens": None if snapshot is None else snapshot.num_tokens,
            "last used": sorted(s.last_used for s in cache._by_serial.values()),
        }
        says = "K/V would reach to the fourth block, the state reaches to the third: the last one with a snapshot, which is used now"
        worked_case("x5.4", got, {"blocks": [11, 12, 13], "tokens": 12, "last used": [0, 7]}, says)

    def test_without_a_snapshot_nothing_is_found(self) -> None:
        cache = SnapshotCache(2)
        cache.cache_snapshot(_taken(cache), 4, 99)
        assert cache.longest_prefix(blocks(11, 12)) == ([], None), "no block has a snapshot: it begins anew"
        assert cache.longest_prefix([]) == ([], None), "nothing is cached"

    def test_the_first_block_alone(self) -> None:
        cache = SnapshotCache(2)
        cache.cache_snapshot(_taken(cache), 4, 11)
        found, snapshot = cache.longest_prefix(blocks(11, 12))
        assert [b.serial for b in found] == [11] and snapshot is not None, "the first block has a snapshot and counts"

    def test_a_second_snapshot_of_a_block_gives_its_slot_back(self) -> None:
        """Two sequences with one prompt ran side by side; both saved their state at the same block."""
        cache = SnapshotCache(2)
        first, second = _taken(cache), _taken(cache)
        cache.cache_snapshot(first, 4, 11)
        cache.clock = 3
        cache.cache_snapshot(second, 4, 11)
        used = [s.last_used for s in cache._by_serial.values()]
        assert used == [0], f"it was taken at 0, and nobody has begun with it since: last used at {used}"
        _, snapshot = cache.longest_prefix(blocks(11))
        assert snapshot is not None and snapshot.slot == first, "the first one stays: this step may load it"
        assert len(cache) == 1, f"one block has one snapshot, not {len(cache)}"
        assert cache.allocate() == second, "the second slot is free again"

    def test_a_new_snapshot_is_recent(self) -> None:
        cache = SnapshotCache(2)
        cache.clock = 5
        cache.cache_snapshot(_taken(cache), 8, 11)
        snapshots = [(s.num_tokens, s.last_used) for s in cache._by_serial.values()]
        assert snapshots == [(8, 5)], f"it was taken after 8 tokens, now, at 5: {snapshots}"

    def test_the_blocks_that_were_given_stay(self) -> None:
        cache, given = SnapshotCache(1), blocks(11, 12, 13)
        cache.cache_snapshot(_taken(cache), 4, 11)
        cache.longest_prefix(given)
        assert len(given) == 3, f"the list that came in lost {3 - len(given)} of its three blocks"


class TestEvicting:
    def test_a_worked_case(self) -> None:
        """Of the two that nobody has used since 3, the one with fewer tokens goes."""
        kept = [Snapshot(0, 512, 9, 11), Snapshot(1, 1024, 3, 12), Snapshot(2, 768, 3, 13), Snapshot(3, 256, 4, 14)]
        says = "768 and 1024 tokens were used last at 3, all others later; 768 saves less than 1024"
        worked_case("x5.5", snapshot_to_evict(kept).slot, 2, says)

    def test_recency_counts_before_length(self) -> None:
        old, short = Snapshot(0, 4096, 1, 11), Snapshot(1, 16, 2, 12)
        assert snapshot_to_evict([short, old]) is old, "the longer one is the least recently used"

    def test_the_first_admission_is_a_time_like_others(self) -> None:
        oldest, later = Snapshot(0, 512, 0, 11), Snapshot(1, 16, 4, 12)
        assert snapshot_to_evict([later, oldest]) is oldest, "used last at 0, before the one that was used at 4"

    def test_any_snapshots_in_any_order(self) -> None:
        chance = random.Random(0)
        for _ in range(200):
            pairs = chance.sample([(u, n) for u in (0, 1, 2, 9) for n in (16, 32, 48, 4096)], chance.randint(1, 8))
            kept = [Snapshot(slot, n, used, 90 - slot) for slot, (used, n) in enumerate(pairs)]
            found = snapshot_to_evict(kept)
            says = f"of (last used, tokens) {pairs} goes {min(pairs)}, not {(found.last_used, found.num_tokens)}"
            assert (found.last_used, found.num_tokens) == min(pairs), says

    def test_it_takes_anything_that_can_be_walked(self) -> None:
        only = Snapshot(0, 16, 0, 11)
        assert snapshot_to_evict({1: only}.values()) is only, "there is but one"
        assert snapshot_to_evict(Once([only])) is only, "there is but one"


class Once:
    """Snapshots that can be walked once, as an iterator can."""

    def __init__(self, snapshots: list[Snapshot]) -> None:
        self.snapshots, self.walked = snapshots, False

    def __iter__(self) -> Iterator[Snapshot]:
        assert not self.walked, "what can be iterated may be an iterator: the snapshots were asked for twice"
        self.walked = True
        return iter(self.snapshots)


def _taken(cache: SnapshotCache) -> int:
    slot = cache.allocate()
    assert slot is not None
    return slot


def manager(num_blocks: int = 20, num_snapshots: int = 3, interval: int = 4) -> SnapshotBlockManager:
    """Blocks of 4 tokens."""
    return SnapshotBlockManager(num_blocks, 4, num_snapshots=num_snapshots, interval=interval)


def admitted(kv: SnapshotBlockManager, tokens: list[int], computed: int) -> Any:
    """A sequence that was let in and has computed so many tokens, a block at a time."""
    seq = make_seq(tokens)
    kv.get_computed_blocks(seq)
    while seq.num_computed_tokens < computed:
        n = min(4, computed - seq.num_computed_tokens)
        assert kv.allocate_slots(seq, n)
        if seq.status is SequenceStatus.WAITING:
            seq.start()
        seq.num_computed_tokens += n
        kv.cache_blocks(seq)
    return seq


class TestManager:
    def test_a_snapshot_cannot_be_found_before_its_step_has_ended(self) -> None:
        """K/V can: a layer stores them before it attends. A state is whole only at the end of the step."""
        kv, seq, other = manager(), make_seq(list(range(9))), make_seq(list(range(9)))
        assert kv.allocate_slots(seq, 8)
        seq.start()
        seq.num_computed_tokens = 8
        kv.cache_scheduled_blocks([seq])
        kv.get_computed_blocks(other)
        assert other.num_computed_tokens == 0 and not kv._loads
        kv.cache_blocks(seq)
        kv.get_computed_blocks(other)
        assert other.num_computed_tokens == 8 and kv._loads == {other.seq_id: 0}

    def test_a_hit_after_eviction(self) -> None:
        """A block that is taken for something else takes its snapshot with it."""
        kv = manager(num_blocks=5, num_snapshots=5)
        kv.free(admitted(kv, list(range(16)), 16))
        assert len(kv.snapshots) == 4
        kv.free(admitted(kv, list(range(100, 112)), 12))  # the free block, then the last two of the first sequence
        seq = make_seq(list(range(16)))
        kv.get_computed_blocks(seq)
        assert seq.num_computed_tokens == 8
        kv.reset()
        assert len(kv.snapshots) == 0

    def test_preemption_gives_up_what_nobody_could_find(self) -> None:
        kv, seq = manager(num_snapshots=1), make_seq(list(range(9)))
        assert kv.allocate_slots(seq, 4)
        assert kv._pending == {seq.seq_id: [(4, 0)]}
        kv.free(seq)
        assert (kv._pending, kv._loads, len(kv.snapshots)) == ({}, {}, 0)
        assert kv.snapshots.allocate() == 0

    def test_no_slot_is_left(self) -> None:
        """All slots belong to steps under way: the state is not saved, and nobody waits for it."""
        kv, first, second = manager(num_snapshots=1), make_seq(list(range(9))), make_seq(list(range(20, 29)))
        assert kv.allocate_slots(first, 4) and kv.allocate_slots(second, 4)
        assert kv._pending == {first.seq_id: [(4, 0)]}


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL: dict[str, Any] = {"block_size": 4, "snapshot_interval": 8, "num_snapshots": 16}


@cache
def asked(*ends: int, texts: tuple[int, ...]) -> Workload:
    """The beginnings of so many tokens, of each of the texts that have these lengths, with M1's answers."""
    return answered(hybrid_checkpoint(), [Request(text[:end], GREEDY) for end in ends for text in prompts(texts)])


@pytest.mark.parametrize("milestone", ["m5", "m6"])
def test_a_conversation_goes_on(milestone: str) -> None:
    """Each turn's prompt is the whole conversation so far: it is found up to its last snapshot, and the text is that of M1."""
    load = asked(21, 40, 70, 100, texts=(100,))
    engine = make_engine(load.model, milestone=milestone, **SMALL)
    load.check(serve(engine, load.requests, "one_by_one"))
    assert engine.scheduler.kv.stats.tokens_hit == 16 + 40 + 64


@pytest.mark.parametrize("fields", [{"num_snapshots": 2}, {"num_kv_blocks": 32}, {"max_num_seqs": 1}], ids=str)
def test_evictions_change_no_text(fields: dict[str, int]) -> None:
    """Prompts that share beginnings, over few snapshots, few blocks, or one row that all use in turn."""
    load = asked(33, 49, 60, texts=(60, 60))
    engine = make_engine(load.model, milestone="m6", **(SMALL | fields))
    for arrival in ("one_by_one", "at_once", "random_steps"):
        load.check(serve(engine, load.requests, arrival))


def test_prompts_end_anywhere_behind_a_border() -> None:
    """Each of one to eight tokens behind the last border, alone in a row that others have used; then one that goes on from there.

    The last piece of a prompt is as short as a decode, or as a verified draft: where steps of a kind are told apart by their
    shape alone, as in vLLM for a while, a state is written to the slot of whoever was there before, or read from it.
    """
    text, other = prompts([40, 30])
    beginnings = [*(text[:end] for end in range(17, 25)), text, other[:1], other]
    load = answered(hybrid_checkpoint(), [Request(prompt, GREEDY) for prompt in beginnings])
    for milestone in ("m5", "m6"):
        engine = make_engine(load.model, milestone=milestone, **(SMALL | {"max_num_seqs": 1}))
        for _ in range(2):  # the second time all of them are found
            load.check(serve(engine, load.requests, "one_by_one"))


def test_a_recording_says_where_states_and_snapshots_are() -> None:
    """What each step loads and saves, and which snapshots there are, over so few blocks and slots that many go."""
    path, (text, other) = hybrid_checkpoint(), prompts([60, 60])
    engine = make_engine(path, milestone="m6", **(SMALL | {"num_snapshots": 3, "num_kv_blocks": 32}))
    data, heard = bytearray(), list[ev.Event]()
    recorder = Recorder(engine, data.extend)
    engine.subscribe(heard.extend)
    serve(engine, [Request(start[:end], GREEDY) for end in (33, 49, 60) for start in (text, other)], "random_steps")
    engine.unsubscribe(heard.extend)
    recorder.close()
    read = [event for turn in parse(data.decode(), "states").turns() for event in turn.events]
    assert told(read) == told(heard)
    kv = engine.scheduler.kv
    assert isinstance(kv, SnapshotBlockManager)
    now = dict[int, int]()
    for event in heard:
        if isinstance(event, ev.SnapshotCached):
            assert event.snapshot not in now, "its slot was free"
            now[event.snapshot] = event.serial
        elif isinstance(event, ev.SnapshotEvicted):
            del now[event.snapshot]
    assert now == {snapshot.slot: serial for serial, snapshot in kv.snapshots._by_serial.items()}
    assert any(isinstance(event, ev.SnapshotEvicted) for event in heard)


def told(events: Any) -> list[Any]:
    """What events say of states: copies by step, and snapshots."""
    found: list[Any] = []
    for event in events:
        if isinstance(event, lines.StepBegan):
            copies = ([i, s.load_state, s.save_state] for i, s in enumerate(event.scheduled_seqs))
            found.append([copy for copy in copies if copy[1:] != [-1, -1]])
        elif isinstance(event, ev.StepBegan):
            found.append((event.output.extras or {}).get("states", np.empty(0)).tolist())
        elif isinstance(event, ev.SnapshotCached | ev.SnapshotEvicted):
            found.append(event)
    return found


def test_without_states_there_are_no_snapshots() -> None:
    from tests.helpers import tiny_checkpoint

    engine = make_engine(tiny_checkpoint(), milestone="m5")
    assert num_snapshots(engine.setup) == 0 and not isinstance(engine.scheduler.kv, SnapshotBlockManager)
