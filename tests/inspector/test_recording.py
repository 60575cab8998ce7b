"""A recording says what the events said: read again it gives the same state after each turn, whatever happened."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from folovllm import events as ev
from folovllm.engine.llm_engine import LLMEngine
from folovllm.inspector.lines import KEY_EVERY, LineWriter, TokenTexts, encode, keyframe
from folovllm.inspector.recorder import Recorder, header_of, recording
from folovllm.inspector.replay import Recording, parse, read
from folovllm.watcher import Watcher
from tests.helpers import tiny_tokenizer
from tests.m5.test_events import GREEDY, World, engine

EVERY = ["m1", "m2", "m3", "m5", "m6"]
WATCHER_TESTS = "tests.course.test_watcher"


class Taped(World):
    """A world that is recorded, with a keyframe every seven turns; what its watcher knew after each turn is kept."""

    def __init__(self, served: LLMEngine, seed: int, key_every: int = 7) -> None:
        super().__init__(served, seed)
        self.data, self.states = bytearray(), list[Watcher]()
        self.recorder = Recorder(served, self.data.extend, key_every=key_every)
        served.subscribe(lambda _: self.states.append(deepcopy(self.watcher)))  # after the watcher

    def replay(self) -> Recording:
        self.recorder.close()
        return parse(self.data.decode(), "taped")


def state_of(watcher: Watcher) -> Any:
    """All that a watcher knows, as a value."""
    cells = [(c.ref_count, c.is_free, c.hash, c.serial, c.parent) for c in watcher.cells]
    seqs = {
        id_: (s.request_id, s.is_running, s.num_tokens, s.num_computed_tokens, tuple(s.block_table), s.refused)
        for id_, s in watcher.sequences.items()
    }
    return cells, seqs


def check_keyframe(key: dict[str, Any], watcher: Watcher) -> None:
    """A keyframe has all that a reader knows who came from the beginning."""
    cached = enumerate(watcher.cells)
    named = {i: [i, f"{cell.hash:016x}", cell.serial, cell.parent] for i, cell in cached if cell.hash is not None}
    assert sorted(key["named"]) == list(named.values())
    own = json.loads(encode(keyframe(watcher, {}, lambda seconds: round(seconds * 1e6))))
    assert key | {"named": []} == own


def assert_replays(taped: Taped) -> Recording:
    """After each turn a watcher of the recording stands where the engine's own stood, and keyframes say the same."""
    found, watcher = taped.replay(), Watcher()
    turns = list(found.turns())
    assert [turn.number for turn in turns] == list(range(-1, len(taped.states) - 1)), "a turn is missing"
    for turn, state in zip(turns, taped.states, strict=True):
        if turn.key is not None:
            check_keyframe(turn.key, watcher)
        watcher(turn.events)
        assert state_of(watcher) == state_of(state)
    assert [t.number for t in turns if t.key] == list(range(7, len(turns) - 1, 7)), "keyframes"
    return found


def tokens_of(found: Recording) -> dict[str, list[int]]:
    """Prompt and answer of each request, put together from the recording."""
    tokens: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for turn in found.turns():
        for event in turn.events:
            if isinstance(event, ev.RequestAdded):
                tokens[event.seq_id], names[event.seq_id] = list(event.prompt_token_ids), event.request_id
            elif isinstance(event, ev.StepEnded):
                for scheduled, ids in zip(event.output.scheduled_seqs, event.result.token_ids, strict=True):
                    tokens[scheduled.seq_id] += ids
    return {names[seq]: ids for seq, ids in tokens.items()}


@pytest.mark.parametrize("milestone", EVERY)
@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_a_recording_replays_to_the_same_states(engines: dict[str, LLMEngine], milestone: str, seed: int) -> None:
    """Through prefix hits, chunks, preemptions, refusals, aborts and evictions."""
    if milestone not in engines:
        engines[milestone] = engine(milestone)
    taped = Taped(engines[milestone], seed)
    try:
        for _ in range(60):
            taped.turn()
    finally:
        taped.engine.abort_request(list(taped.engine.core.output.requests))
        taped.engine.step()  # takes in what is in flight
        for listener in [one for one in taped.engine.events._listeners if one is not taped.recorder]:
            taped.engine.unsubscribe(listener)
    assert_replays(taped)
    assert not taped.engine.events.on


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLMEngine]]:
    yield (made := {})
    for served in made.values():
        served.executor.shutdown = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("milestone", EVERY)
def test_a_recording_that_begins_late(milestone: str) -> None:
    """Requests run, blocks are cached, and with overlap a step is in flight: the first keyframe has it all, tokens too."""
    world = World(engine(milestone), 3)
    for _ in range(25):
        world.turn()
    running = {seq.seq_id: seq for seq in (*world.engine.scheduler.running, *world.engine.scheduler.waiting)}
    known = {seq_id: seq.token_ids.tolist() for seq_id, seq in running.items()}
    late = Taped(world.engine, 4)
    late.names = 1000
    cached = {
        str(b.block_id): b.token_ids
        for b in getattr(getattr(world.engine.scheduler, "kv", None), "blocks", ())
        if b.hash
    }
    for _ in range(25):
        late.turn()
    found = assert_replays(late)
    first = next(line for line in found.lines if line[0] == "key")[3]
    assert first["tokens"] == {str(seq_id): ids for seq_id, ids in known.items()}
    assert first["block_tokens"].keys() == cached.keys() and (milestone not in ("m5", "m6") or cached)
    assert all(len(ids) == 4 for ids in first["block_tokens"].values())


def test_all_events_come_back() -> None:
    """Not the state alone: each event is the one that was told."""
    taped = Taped(engine("m5"), 1)
    told: list[ev.Event] = []
    taped.engine.subscribe(told.extend)
    told.clear()
    for _ in range(300):
        taped.turn()
    found = [event for turn in taped.replay().turns() for event in turn.events][1:]
    assert len(found) == len(told)
    begins = dict[int, Any]()
    for a, b in zip(found, told, strict=True):
        assert type(a) is type(b)
        if isinstance(a, ev.StepBegan) and isinstance(b, ev.StepBegan):
            begins[a.step] = a.output
            assert [plain(s) for s in a.output.scheduled_seqs] == [plain(s) for s in b.output.scheduled_seqs]
            assert (a.step, a.budget_left) == (b.step, b.budget_left)
        elif isinstance(a, ev.StepEnded) and isinstance(b, ev.StepEnded):
            assert a.output is begins[a.step] and a.result.token_ids == b.result.token_ids
            assert (a.step, a.waiting, a.kv_blocks_used) == (b.step, b.waiting, b.kv_blocks_used)
        elif isinstance(a, ev.RequestAdded) and isinstance(b, ev.RequestAdded):
            assert a._replace(time=0) == b._replace(time=0)
        else:
            assert a == b
    kinds = {type(event) for event in found}
    assert {ev.Preempted, ev.PrefixHit, ev.BlockEvicted, ev.BlockAdopted, ev.Aborted, ev.Refused} <= kinds


def plain(scheduled: Any) -> Any:
    """What a recording keeps of a share."""
    return scheduled.seq_id, scheduled.start, scheduled.num_new_tokens, scheduled.num_samples, scheduled.new_blocks


@pytest.mark.parametrize(
    "name", ["m2.2", "m2.3", "m2.4", "m3.2", "m3.3", "m3.4", "m3.6", "m5.1", "m5.3", "m5.4", "m5.5"]
)
def test_wrong_answers_are_recorded_as_what_they_do(name: str) -> None:
    """A learner's mistake behind it: who replays the recording sees the manager's own blocks, as the live watcher does.

    `test_reducer.py` has the page replay recordings of all wrong answers; here is the first one of each exercise.
    """
    watcher_tests = importlib.import_module(WATCHER_TESTS)
    answer = next(answer for answer in watcher_tests.ANSWERS if answer.exercise.id == name)
    with pytest.MonkeyPatch.context() as patch:
        watcher_tests.put_in(answer, patch)
        taped = Taped(engine(watcher_tests.MILESTONES[name]), 0)
        patch.setattr(taped, "compare", lambda: None)
        for _ in range(60):
            try:
                taped.turn()
            except Exception:  # wrong code may raise what it likes
                taped.engine.events.drain()
        assert_replays(taped)


def test_a_thousand_steps() -> None:
    """Keyframes come every 256 turns, each is right, and the last state is the engine's."""
    world, data, watcher = World(engine("m3"), 5), bytearray(), Watcher()
    recorder = Recorder(world.engine, data.extend)
    world.compare = lambda: None  # type: ignore[method-assign]
    while world.engine.core.num_steps < 1000:
        world.turn()
    recorder.close()
    keys = []
    for turn in parse(data.decode(), "long").turns():
        if turn.key is not None:
            check_keyframe(turn.key, watcher)
            keys.append(turn.number)
        watcher(turn.events)
    assert state_of(watcher) == state_of(world.watcher)
    assert keys == list(range(KEY_EVERY, keys[-1] + 1, KEY_EVERY)) and len(keys) >= 3


def test_the_tokens_are_those_of_the_answers_and_have_texts_before_they_are_needed(tmp_path: Path) -> None:
    served = engine("m5")
    with recording(served, tmp_path / "run.jsonl"):
        outputs = served.generate([[1] * 9, list(range(200, 220))], GREEDY)
    assert isinstance(outputs, list)
    found, told, seen = read(tmp_path / "run.jsonl"), set[int](), 0
    assert list(tokens_of(found).values()) == [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    for line in found.lines:
        if line[0] == "texts":
            assert not told & set(map(int, line[1])), "told twice"
            told |= set(map(int, line[1]))
        for event in line[3] if line[0] == "turn" else ():
            ids = event[4] if event[0] == "add" else event[6] if event[0] == "end" else []
            seen += len(ids)
            assert set(ids) <= told
    assert seen == 9 + 20 + 8


def test_texts_of_bytes_and_of_pieces() -> None:
    """A byte that is no character is a list; put together, the bytes are the text."""
    tokenizer = tiny_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("é ok", add_special_tokens=False)
    found = texts.of([*ids, 256])
    parts = [found[str(id_)] for id_ in ids]
    assert parts == [[0xC3], [0xA9], " ", "o", "k"] and found["256"] == "<|endoftext|>"
    assert texts.of([100_000]) == {}

    class SentencePiece:
        all_special_tokens: tuple[str, ...] = ("</s>",)

        def get_vocab(self) -> dict[str, int]:
            return {"▁the": 5, "<0xE2>": 6, "</s>": 2, "<0x41>": 7}

    assert TokenTexts(SentencePiece()).of([2, 5, 6, 7]) == {"2": "</s>", "5": " the", "6": [0xE2], "7": "A"}  # type: ignore[arg-type]


class TestTheFile:
    def test_cut_off_anywhere_it_still_replays(self, tmp_path: Path) -> None:
        served = engine("m3")
        with recording(served, tmp_path / "run.jsonl"):
            served.generate([[1] * 9], GREEDY)
        data = (tmp_path / "run.jsonl").read_bytes()
        whole = list(parse(data.decode(), "whole").turns())
        for end in range(data.index(b'["turn"'), len(data), 7):
            turns = list(parse(data[:end].decode(), "part").turns())
            assert [t.number for t in turns] == [t.number for t in whole[: len(turns)]]
        assert parse(data.decode(), "whole").how == "closed"
        assert parse(data[:-5].decode(), "whole").how is None

    def test_an_error_ends_it_and_is_told(self, tmp_path: Path) -> None:
        served = engine("m3")
        with pytest.raises(RuntimeError), recording(served, tmp_path / "run.jsonl"):
            served.add_request("a", [1] * 9, GREEDY)
            served.step()
            raise RuntimeError("the engine broke")
        assert read(tmp_path / "run.jsonl").how == "RuntimeError: the engine broke"
        assert not served.events.on

    def test_what_is_no_recording_is_refused_by_name(self, tmp_path: Path) -> None:
        file = tmp_path / "x.jsonl"
        header = {"format": "folovllm recording", "version": 0, "engine": {}}
        for text, says in [
            ("", "x.jsonl is no recording"),
            ("[1]\n", "is no recording"),
            (
                json.dumps(header) + "\n",
                "x.jsonl is a recording of version 0, and this reads version 1: record it anew",
            ),
            (json.dumps(header | {"version": 1}) + "\nno\n[]\n", "x.jsonl, line 2 is no JSON"),
        ]:
            file.write_text(text)
            with pytest.raises(ValueError, match=says):
                read(file)
        with pytest.raises(ValueError, match="cannot read"):
            read(tmp_path / "none.jsonl")
        file.write_text(json.dumps(header | {"version": 1}) + '\n["turn",0,0,[["sing",1]]]\n')
        with pytest.raises(ValueError, match="line 2 is no line of a recording"):
            list(read(file).turns())

    def test_a_file_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="cannot record into"), recording(engine("m3"), tmp_path / "no" / "x"):
            pass

    def test_a_full_disk_ends_the_recording_and_not_the_engine(self) -> None:
        served, sizes = engine("m3"), list[int]()

        def write(data: bytes) -> None:
            sizes.append(len(data))
            if len(sizes) > 2:
                raise OSError(28, "No space left on device")

        recorder = Recorder(served, write)
        served.generate([[1] * 9], GREEDY)
        with pytest.raises(OSError, match="No space left"):
            recorder.close()
        assert len(sizes) == 3 and not served.events.on


def test_numbers_of_numpy_are_written(tmp_path: Path) -> None:
    """A learner's code may hand them in."""
    served = engine("m3")
    lines = LineWriter(header_of(served, "", None), TokenTexts(served.tokenizer), 0.0)
    list(lines.lines([ev.Snapshot(4, 4, 1, 8, 0, (), ())], 0.0))
    (line,) = lines.lines([ev.BlockTaken(int(np.int64(1))), ev.BlockFreed(np.int64(2))], 0.0)  # type: ignore[arg-type]
    assert json.loads(line) == ["turn", 0, 0, [["take", 1], ["free", 2]]]
