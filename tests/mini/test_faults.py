"""What the tool says of an engine that fails: a sentence, a recording of the steps before, and an exit status."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from folovllm import LLM
from folovllm.apps.inspector.lines import parse
from folovllm.apps.inspector.watcher import Watcher
from milestones.cli import app
from milestones.mine import Mine
from milestones.mini import harness, score
from milestones.mini.course import HERE, Own
from milestones.mini.film import recording
from milestones.mini.given.contract import Limits, Step
from milestones.mini.harness import REFERENCE, Trace
from milestones.mini.ledger import Ledger, Rejected
from tests.helpers import tiny_checkpoint
from tests.mini.conftest import random_asks, reference, slots

ENGINE = """
from {module} import {base}

class Wrong({base}):
    number = -1

    def step(self):
        self.number += 1
        step = super().step()
        if self.number == {when}:
            {fault}
        return step

def make(folder, limits, device):
    engine = Wrong(folder, limits)
    {made}
    return engine
"""
MADE = {  # what is wrong before the first step, or in it: (stage, line, what is said)
    "no engine": (3, "return", "`make` in adapters.py returned None"),
    "no cache": (3, "del engine.cache", "engine.cache is a NoneType"),
    "no attend": (4, "engine.attend = None", "the engine has no `attend`"),
    "two blocks at once": (4, "engine.attend = lambda q, k, v, table, start: k[table]", "read several blocks at once"),
    "not written": (3, "raise NotImplementedError('blocks [n]')", "not written yet: blocks [n]"),
}
STEPS = {  # what a step does: (line, what is said)
    "no step": ("return None", "returned None, and not Step(work, tables, tokens, preempted)"),
    "a tuple": ("return tuple(step)", "and not Step(work, tables, tokens, preempted)"),
    "no triples": ("return step._replace(work=[id for id, _, _ in step.work])", "returned a Step whose work are ['a'"),
    "a tensor": (
        "import torch; return step._replace(tokens={'a': torch.tensor(5)})",
        "returned a Step whose tokens are {'a': tensor(5)}, and not dict[str, int]",
    ),
    "an unknown id": ("return step._replace(tokens={'z': 5})", "names 'z', and nobody of that name came"),
    "an unknown victim": ("return step._replace(preempted=['z'])", "names 'z', and nobody of that name came"),
    "an unknown block": (
        "return step._replace(tables={'a': [99]})",
        "gives a block 99, and there are blocks 0 to 15",
    ),
    "an error": ("[][0]", None),
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Own:
    """A learner's folder elsewhere, with the reference's files."""
    monkeypatch.setattr(Mine, "of", classmethod(lambda cls, course: Mine(course, tmp_path)))
    own = Own(tmp_path / "mini")
    own.begin()
    shutil.copytree(REFERENCE, own.folder, dirs_exist_ok=True)
    return own


def run(own: Own, command: list[str], module: str, base: str, **of: Any) -> Result:
    """What a command of mini does with an engine that has one fault."""
    text = ENGINE.format(module=module, base=base, **{"when": 0, "fault": "pass", "made": "pass", **of})
    (own.folder / "adapters.py").write_text(text)
    return CliRunner().invoke(app, ["mini", *command])


@pytest.mark.parametrize("fault", MADE)
def test_no_recording_where_there_is_no_step(fault: str, own: Own, tmp_path: Path) -> None:
    stage, made, expected = MADE[fault]
    module, base = ("blocks", "PagedEngine") if stage == 3 else ("attention", "TiledEngine")
    file = tmp_path / "run.jsonl"
    result = run(own, ["record", str(file), "--stage", str(stage)], module, base, made=made)
    assert expected in result.output and "no step to record" in result.output
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit) and not file.exists()


@pytest.mark.parametrize(("fault", "when"), [("no step", 0), ("an error", 0), *((fault, 3) for fault in STEPS)])
def test_a_recording_has_the_steps_before_the_fault(
    fault: str, when: int, own: Own, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line, expected = STEPS[fault]
    file = tmp_path / "run.jsonl"
    command = ["record", str(file), "--stage", "3"]
    result = run(own, command, "blocks", "PagedEngine", when=when, fault=line)
    if expected is None:  # an error of the engine's own: the learner needs its lines
        shown = capfd.readouterr().err  # of the engine's own process
        assert "adapters.py" in shown and "IndexError" in shown and f"step {when} raised this" in shown
        assert "IndexError" in result.output
    else:
        assert f"step {when} " in result.output and expected in result.output
    assert result.exit_code == int(when == 0) and not isinstance(result.exception, Rejected | IndexError)
    assert file.exists() == (when > 0)
    if when:
        assert watched(file.read_text("utf-8")) == when


def test_a_score_of_a_wrong_engine_is_one_sentence(own: Own, capfd: pytest.CaptureFixture[str]) -> None:
    fault = "return step._replace(tokens={id: token + 1 for id, token in step.tokens.items()})"
    result = run(own, ["score", "3"], "blocks", "PagedEngine", fault=fault)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    said = result.output.splitlines()
    assert capfd.readouterr().out == "counted: yours\n", "progress, by the engine's own process"
    assert len(said) == 1 and "step 0 gives a token" in said[0]
    result = run(own, ["score", "3"], "blocks", "PagedEngine", made=MADE["not written"][1])
    assert result.exit_code == 1 and result.output.endswith("not written yet: blocks [n]\n"), "brackets are no markup"
    assert not (own.folder / ".history.json").exists()


def watched(text: str) -> int:
    """Replay a recording, and count its turns."""
    state, turns = Watcher(), parse(text, "mini.jsonl").turns()
    for turn in turns:
        state(turn.events)
    return turns[-1].number  # behind the snapshot with which it begins


IDS = st.sampled_from("aaabbbcccz")
NUMBERS = st.integers(0, 30) | st.integers(-30, 30)
ANY_STEP = st.builds(
    Step,
    st.lists(st.tuples(IDS, NUMBERS, NUMBERS), max_size=3, unique_by=lambda work: work[0]),
    st.dictionaries(IDS, st.lists(st.integers(0, 1) | st.integers(-1, 12), max_size=4)),
    st.dictionaries(IDS, NUMBERS),
    st.lists(IDS, max_size=3),
)


@settings(max_examples=100)
@given(st.integers(0, 6), st.integers(3, 12), ANY_STEP)
def test_whatever_the_last_step_says(stage: int, number: int, last: Step) -> None:
    """The ledger rejects it in a sentence or takes it. If it has passed `form`, it is recorded, and the inspector reads it."""
    whole = reference(stage)
    ledger = Ledger(whole.asks, whole.limits, stage)
    for i, step in enumerate(whole.steps[:number]):
        for ask in whole.asks:
            if ask.arrives == i:
                ledger.add(ask)
        ledger.form(step)
        ledger.check(step)
    with suppress(Rejected):
        ledger.form(last)
        steps, times = [*whole.steps[:number], last], whole.times[: number + 1]
        trace = Trace(whole.limits, whole.asks, steps, times, whole.arrived)
        assert watched(recording(trace, "mini", "tiny", {}, stage)) == number + 1
        ledger.check(last)


@pytest.mark.parametrize(("held", "place"), [(4, 1), (8, 0)])
def test_a_block_that_holds_too_few_or_too_many_tokens(held: int, place: int) -> None:
    """Blocks of 4: it holds tokens 0 to `held`, and stands in a place for others. They differ from token 4 on."""
    [ask] = random_asks([(12, 2)])
    ledger = Ledger([ask], Limits(8, 4, 2, 64), 5)
    ledger.add(ask)
    ledger.contents = {3: (list(ask.prompt), held), 5: (list(ask.prompt), 4)}
    table = [3] if place == 0 else [5, 3]
    with pytest.raises(Rejected, match=f"block 3 as its block {place}, .* of other tokens, from token 4 on"):
        ledger.check(Step([("a", 4 * len(table), 12 - 4 * len(table))], {"a": [*table, 1, 2][:3]}, {"a": 0}, []))


@pytest.mark.parametrize(("stage", "longest"), [(1, 128), (2, 64), (3, 48)])
def test_the_longest_text_of_a_recording(stage: int, longest: int) -> None:
    """In stage 2 a block is as long as the longest text. In the others a text may have all blocks."""
    header = parse(recording(reference(stage), "mini", "tiny", {}, stage), "mini").header
    assert header["engine"]["max_model_len"] == longest


def test_serve_ends_though_the_engine_gives_no_token() -> None:
    class Silent:
        def add(self, *request: object) -> None:
            pass

        def step(self) -> Step:
            return Step([], {}, {}, [])

    with pytest.raises(Rejected, match=r"after \d+ steps these still wait for tokens: 0 \(0 of 2\)"):
        harness.serve(Silent(), [([1, 2], 2)])


def test_all_are_timed_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Yours, the reference, the real engine and transformers: the best of three each. The real engine is closed."""
    played = Counter[int]()
    score.workload(0)

    def counted(adapters: Any, folder: Path, trace: Trace, stage: int, **of: Any) -> Trace:
        played[stage] += 1
        return harness.play(adapters, tiny_checkpoint(), Trace(slots(1), random_asks([(3, 2)])), 0, **of)

    monkeypatch.setattr(score, "play", counted)
    with (
        patch.object(LLM, "generate") as generate,
        patch.object(LLM, "close", autospec=True, side_effect=LLM.close) as close,
    ):
        speeds = {"yours": score.speed(HERE / "wrong/3_freed_twice.py", 3)} | score.speeds(3)
    assert played == {3: 6, 0: 3} and generate.call_count == 3 and close.call_count == 1
    assert list(speeds) == ["yours", "the reference", "FoloVLLM", "transformers"] and min(speeds.values()) > 0
