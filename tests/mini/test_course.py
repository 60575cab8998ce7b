"""Mini as a course: the folder, the two paths, what a learner has passed, and the texts."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from milestones.cli import app
from milestones.manifest import Course
from milestones.mine import Mine
from milestones.mini import alone, score
from milestones.mini.course import HERE, Notes, Own, stages
from milestones.mini.harness import REFERENCE, Trace, load, play
from milestones.mini.ledger import Ask
from tests.helpers import tiny_checkpoint
from tests.mini.conftest import slots
from tools.recordings import without_times

ROOT = Path(__file__).resolve().parents[2]
run = CliRunner().invoke


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Own:
    """A learner's folder elsewhere."""
    monkeypatch.setattr(Mine, "of", classmethod(lambda cls, course: Mine(course, tmp_path)))
    return Own(tmp_path / "mini")


def test_build_makes_the_folder_and_never_touches_it_again(own: Own) -> None:
    assert run(app, ["build", "mini"]).exit_code == 0
    assert {file.name for file in own.folder.iterdir()} == {"adapters.py", "contract.py", ".progress.json"}
    (own.folder / "adapters.py").write_text("mine = 1\n")
    assert "left as it is" in run(app, ["build", "mini"]).output
    assert (own.folder / "adapters.py").read_text() == "mine = 1\n"


def test_the_path_decides_what_comes_next(own: Own) -> None:
    assert "start m1" in run(app, []).output, "whoever has chosen nothing is on the path of exercises"
    run(app, ["path", "mini"])
    assert "Next: stage 0" in run(app, []).output
    run(app, ["path", "engine"])
    assert "start m1" in run(app, []).output
    own.save(Notes(passed=2))
    run(app, ["path", "mini"])
    assert "Next: stage 3" in run(app, []).output


def test_test_notes_what_has_passed(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    own.begin()
    monkeypatch.setattr("subprocess.run", lambda command, **_: type("Done", (), {"returncode": 1 * ("-k" in command)}))
    assert run(app, ["mini", "test", "0", "-k", "nothing"]).exit_code == 1 and own.notes.passed == -1
    assert run(app, ["mini", "test"]).exit_code == 0 and own.notes.passed == 0
    assert run(app, ["mini", "test", "0"]).exit_code == 0 and own.notes.passed == 0, "a stage again"
    assert own.stage(None).number == 1


@pytest.mark.slow
def test_the_tests_run_on_the_learner_s_engine(own: Own, warm: None) -> None:
    own.begin()
    assert own.test(stages()[0], []) == 1, "the template's make is not written"
    shutil.copytree(REFERENCE, own.folder, dirs_exist_ok=True)
    assert own.test(stages()[0], []) == 0 and own.notes.passed == 0


def test_hints_come_one_at_a_time(own: Own) -> None:
    own.begin()
    assert "1 of 3 hints" in run(app, ["mini", "hint"]).output
    assert "2 of 3 hints" in run(app, ["mini", "hint"]).output
    assert (
        "3 of 3 hints; one way is in milestones/mini/reference/serial.py" in run(app, ["mini", "hint", "--all"]).output
    )


def test_a_score_is_kept_and_shown_beside_the_next(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    few = tuple(replace(ask, answer=ask.answer[:3]) for ask in score.workload()[:2])
    monkeypatch.setattr(score, "workload", lambda: few)
    monkeypatch.setattr(score, "speeds", lambda stage, tell: {"transformers": 900.0})
    monkeypatch.setattr(score, "speed", lambda folder, stage: 1234.0)
    monkeypatch.setattr(alone, "call", alone.work)  # in a child there is no short workload
    own.begin()
    shutil.copytree(REFERENCE, own.folder, dirs_exist_ok=True)
    first, second = (run(app, ["mini", "score", *of]) for of in (["3", "--time"], ["5"]))
    assert first.exit_code == second.exit_code == 0
    assert "stage 3, " not in first.output and "stage 3, " in second.output and "stage 5, " not in second.output
    assert "1,234" in first.output and "1,234" in second.output, "a speed is kept, too"
    assert "counted: yours" in first.output and "counted: the reference" in first.output, "it says what it is at"
    assert torch.get_num_threads() == 1
    history = json.loads((own.folder / ".history.json").read_text())
    assert [entry["stage"] for entry in history] == [3, 5]
    assert history[1]["counts"]["tokens computed"] < history[0]["counts"]["tokens computed"], (
        "stage 5 finds prefixes again"
    )


def test_the_stored_recording_is_what_the_reference_does(own: Own, tmp_path: Path) -> None:
    """The page's picture shows it: `python -m milestones mini record milestones/mini/recording.jsonl --stage 5`."""
    own.begin()
    shutil.copytree(REFERENCE, own.folder, dirs_exist_ok=True)
    assert run(app, ["mini", "record", str(tmp_path / "run.jsonl"), "--stage", "5"]).exit_code == 0
    assert without_times(tmp_path / "run.jsonl") == without_times(HERE / "recording.jsonl")


def test_a_recording_ends_where_the_engine_is_wrong(own: Own, tmp_path: Path) -> None:
    own.begin()
    shutil.copytree(REFERENCE, own.folder, dirs_exist_ok=True)
    shutil.copy(HERE / "wrong/3_computed_is_kept.py", own.folder / "adapters.py")
    said = run(app, ["mini", "record", str(tmp_path / "run.jsonl"), "--stage", "3"]).output
    assert "nothing of it was computed: the recording ends there" in said
    assert (tmp_path / "run.jsonl").read_text().splitlines()[-1].endswith('"closed"]')


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import os; os._exit(0)", "the engine's process ended before its work was done, status 0"),
        ("while True: ...", "the engine was still running after 20 seconds"),
        ("__import__('folo' + 'vllm')", "the engine imports folovllm"),
        (
            "import sys; assert sys.modules['folovllm'] is None; raise NotImplementedError('all')",
            "not written yet: all",
        ),
    ],
)
def test_an_engine_runs_alone(tmp_path: Path, line: str, said: str, warm: None) -> None:
    (tmp_path / "adapters.py").write_text(f"def make(*a):\n    {line}\n")
    limit = 20 if "while" in line else 120
    assert said in alone.call(alone.Job("record", str(tmp_path), 2), limit).error


def test_an_import_of_the_engine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapters.py").write_text("import torch\nfrom folovllm import LLM\n")
    with pytest.raises(ValueError, match=r"adapters.py, line 2 imports folovllm: mini is an engine of your own"):
        load(tmp_path)


def test_an_error_of_the_engine_says_when(tmp_path: Path) -> None:
    text = (
        "class Engine:\n    def add(self, *a): pass\n    def step(self): return [][0]\ndef make(*a): return Engine()\n"
    )
    (tmp_path / "adapters.py").write_text(text)
    with pytest.raises(IndexError) as caught:
        play(load(tmp_path), tiny_checkpoint(), Trace(slots(1), [Ask("a", (1, 2), (3, 4))]), 0)
    assert "step 0 raised this; these wait for tokens: a (0 of 2)" in caught.value.__notes__[0]


def test_the_reference_is_small() -> None:
    """What a learner compares with: 450 lines of code in all, and no file longer than two screens of 75 lines."""
    lines = {file.name: len(file.read_text("utf-8").splitlines()) for file in REFERENCE.glob("*.py")}
    assert max(lines.values()) <= 150, lines
    code = sum(
        bool(re.match(r"\s*[^\s#]", line))
        for file in REFERENCE.glob("*.py")
        for line in file.read_text("utf-8").split("\n")
    )
    assert code <= 465, f"{code} lines that are neither empty nor a comment"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_stage_has_its_texts(language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLOVLLM_LANG", language)
    for stage in stages():
        assert len(stage.hints) == 3 and "<!-- source" not in str(stage.hints)
        assert stage.task.startswith(f"## {'Stage' if language == 'en' else '第'} {stage.number}")
        assert "<!-- source" not in stage.task
        assert (ROOT / stage.read).is_file()
        assert all(Course(ROOT).exercise(id) for id in stage.surgery)


def test_the_score_s_workload_has_prefixes_in_common() -> None:
    prompts = [ask.prompt for ask in score.workload()]
    assert sum(prompt[:16] == prompts[0][:16] for prompt in prompts) >= 3
