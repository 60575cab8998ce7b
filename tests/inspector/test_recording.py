"""A recording says what the events said: read again it gives the same state after each turn, whatever happened."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.apps.inspector import lines
from folovllm.apps.inspector.lines import Recording, Texts, Turn, parse, read
from folovllm.apps.inspector.recorder import Recorder, TokenTexts, recording, tokens_of_entry
from folovllm.apps.inspector.watcher import Watcher
from folovllm.engine import events as ev
from folovllm.engine.llm_engine import LLMEngine
from tests.helpers import tiny_tokenizer
from tests.inspector.browser import SAMPLES
from tests.m5.test_events import GREEDY, World, engine


class Taped(World):
    """A world that is recorded; what its watcher knew after each turn is kept."""

    def __init__(self, served: LLMEngine, seed: int) -> None:
        super().__init__(served, seed)
        self.data, self.states = bytearray(), list[Watcher]()
        self.recorder = Recorder(served, self.data.extend)
        served.subscribe(lambda _: self.states.append(deepcopy(self.watcher)))  # after the watcher

    def replay(self) -> Recording:
        self.recorder.close()
        return parse(self.data.decode(), "taped")


def state_of(watcher: Watcher) -> Any:
    """All that a watcher knows, as a value."""
    seqs = {
        id_: (s.request_id, s.is_running, s.num_tokens, s.num_computed_tokens, tuple(s.block_table), s.refused)
        for id_, s in watcher.sequences.items()
    }
    return watcher.cells, seqs


def replayed(found: Recording) -> Watcher:
    """A watcher of it."""
    watcher = Watcher()
    for turn in found.turns():
        watcher(turn.events)
    return watcher


def assert_replays(taped: Taped) -> Recording:
    """After each turn a watcher of the recording stands where the engine's own stood."""
    found, watcher = taped.replay(), Watcher()
    turns = found.turns()
    assert [turn.number for turn in turns] == list(range(len(taped.states))), "a turn is missing"
    for turn, state in zip(turns, taped.states, strict=True):
        watcher(turn.events)
        assert state_of(watcher) == state_of(state)
    return found


def tokens_of(found: Recording) -> dict[str, list[int]]:
    """Prompt and answer of each request, put together from the recording."""
    tokens: dict[int, list[int]] = {}
    names: dict[int, str] = {}
    for event in (event for turn in found.turns() for event in turn.events):
        if isinstance(event, ev.RequestAdded):
            tokens[event.seq_id], names[event.seq_id] = list(event.prompt_token_ids), event.request_id
        elif isinstance(event, lines.StepEnded):
            for seq_id, ids in event.sampled:
                tokens[seq_id] += ids
    return {names[seq]: ids for seq, ids in tokens.items()}


@pytest.mark.parametrize(("milestone", "turns"), [("m1", 60), ("m2", 60), ("m3", 60), ("m5", 300), ("m6", 60)])
def test_all_events_come_back_and_a_recording_may_begin_late(milestone: str, turns: int) -> None:
    """Through prefix hits, chunks, preemptions, refusals, aborts and evictions, from the middle, with all tokens so far."""
    early = World(engine(milestone), 3)
    for _ in range(60):
        early.turn()
    running = (*early.engine.scheduler.running, *early.engine.scheduler.waiting)
    known = {seq.seq_id: seq.token_ids.tolist() for seq in running}
    cached = [b for b in getattr(getattr(early.engine.scheduler, "kv", None), "blocks", ()) if b.hash]
    late = Taped(early.engine, 4)
    late.names = 1000
    late.engine.subscribe((emitted := list[ev.Event]()).extend)
    for _ in range(turns):
        late.turn()
    found = [event for turn in assert_replays(late).turns() for event in turn.events]
    assert list(map(plain, found)) == list(map(plain, emitted))
    snapshot, kinds = found[0], {type(event) for event in found}
    assert isinstance(snapshot, ev.Snapshot)
    assert {seq.added.seq_id: list(seq.token_ids) for seq in snapshot.sequences} == known
    named = {block.block_id: len(block.token_ids) for block in snapshot.blocks if block.hash is not None}
    assert named == dict.fromkeys((block.block_id for block in cached), 16)
    if milestone == "m5":
        assert named and {ev.Preempted, ev.PrefixHit, ev.BlockEvicted, ev.BlockAdopted, ev.Aborted, ev.Refused} <= kinds


def plain(event: ev.Event | lines.Entry) -> Any:
    """An event as far as a recording keeps it."""
    name = type(event).__name__
    if isinstance(event, ev.StepBegan | lines.StepBegan):
        seqs = [
            (s.seq_id, s.row, s.start, s.end, s.num_samples, s.first_new_block, list(s.new_blocks))
            for s in event.scheduled_seqs
        ]
        return name, event.step, event.start, seqs, event.budget_left
    if isinstance(event, ev.StepEnded | lines.StepEnded):
        return name, event.step, event.start, event.sampled, event.waiting
    return name, msgspec.to_builtins(event, enc_hook=lambda numbers: numbers.tolist())


def test_the_tokens_are_those_of_the_answers_and_have_texts_before_they_are_needed(tmp_path: Path) -> None:
    served = engine("m5")
    with recording(served, tmp_path / "run.jsonl"):
        outputs = served.generate([[1] * 9, list(range(200, 220))], GREEDY)
    assert isinstance(outputs, list)
    found, known = read(tmp_path / "run.jsonl"), set[int]()
    assert list(tokens_of(found).values()) == [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    for line in found.lines:
        if isinstance(line, Texts):
            assert not known & set(map(int, line.texts)), "written twice"
            known |= set(map(int, line.texts))
        elif isinstance(line, Turn):
            assert {token for entry in line.events for token in tokens_of_entry(entry)} <= known


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


HEADER = '{"format": "folovllm recording", "version": 2, "engine": {}}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "x.jsonl is no recording"),
        ("[" * 100_000 + "\n", "is no recording"),
        (HEADER.replace("2", "1"), "x.jsonl is a recording of version 1, and this reads version 2: record"),
        (f"{HEADER}no\n[]\n", "x.jsonl, line 2 is no line of a recording"),
        (f"{HEADER}{'[' * 100_000}]\n", "line 2 is no line of a recording"),
        (f'{HEADER}["Turn",0,0,[["Sing",1]]]\n', "line 2 is no line of a recording: .*Sing"),
        (f'{HEADER}["Turn",0,0,[["BlockFreed",1e99]]]\n', "line 2 is no line of a recording"),
    ],
)
def test_what_is_no_recording_is_refused_in_a_sentence(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ValueError, match=says):
        read(tmp_path / "x.jsonl")


@settings(max_examples=200)
@given(die=st.randoms(use_true_random=False))
def test_a_damaged_recording_is_read_or_refused_and_ends_in_nothing_else(die: Any) -> None:
    """A value is replaced, or the file is cut off."""
    rows = (SAMPLES / "m5.jsonl").read_text(encoding="utf-8").splitlines()
    number = die.randrange(len(rows))
    value = place = json.loads(rows[number])
    while isinstance(place, list | dict) and place:
        inner, key = place, die.choice(list(place) if isinstance(place, dict) else range(len(place)))
        place = place[key]
        if die.random() < 0.3:
            break
    inner[key] = die.choice([None, -1, 1 << 62, 10**30, 0.5, "x", [], {}, True, [[[]]], "Turn", "StepEnded"])
    rows[number] = json.dumps(value)
    text = "\n".join(rows)
    try:
        for turn in parse(text[: die.choice((len(text), die.randrange(len(text))))], "x").turns():
            assert turn.events is not None
    except ValueError as error:
        assert "\n" not in str(error) and str(error).startswith("x")


def test_cut_off_anywhere_it_still_replays(tmp_path: Path) -> None:
    served = engine("m3")
    with recording(served, tmp_path / "run.jsonl"):
        served.generate([[1] * 9], GREEDY)
    data = (tmp_path / "run.jsonl").read_bytes()
    whole = parse(data.decode(), "whole")
    for end in range(data.index(b'["Turn"'), len(data), 7):
        turns = parse(data[:end].decode(), "part").turns()
        assert turns == whole.turns()[: len(turns)]
    assert whole.how == "closed" and parse(data[:-5].decode(), "whole").how is None


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_or_ctrl_c_ends_it_and_is_written(error: type[BaseException], tmp_path: Path) -> None:
    served = engine("m3")
    with pytest.raises(error), recording(served, tmp_path / "run.jsonl"):
        served.add_request("a", [1] * 9, GREEDY)
        served.step()
        raise error("the engine broke")
    found = read(tmp_path / "run.jsonl")
    assert found.how == f"{error.__name__}: the engine broke" and len(found.turns()) > 1
    assert not served.events.on


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """A full disk ends the recording and not the engine."""
    served, sizes = engine("m3"), list[int]()
    with pytest.raises(ValueError, match="cannot record into"), recording(served, tmp_path / "no" / "x"):
        pass

    def write(data: bytes) -> None:
        sizes.append(len(data))
        if len(sizes) > 2:
            raise OSError(28, "No space left on device")

    recorder = Recorder(served, write)
    served.generate([[1] * 9], GREEDY)
    with pytest.raises(OSError, match="No space left"):
        recorder.close()
    assert len(sizes) == 3 and not served.events.on


def test_numbers_of_numpy_are_written() -> None:
    """A learner's code may hand them in."""
    data = bytearray()
    recorder = Recorder(engine("m3"), data.extend)
    recorder([ev.BlockTaken(1), ev.BlockFreed(np.int64(2))])  # type: ignore[arg-type]
    recorder.close()
    assert json.loads(data.splitlines()[-2])[3] == [["BlockTaken", 1], ["BlockFreed", 2]]
