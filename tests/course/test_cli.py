"""The commands, as a learner meets them: in a process of their own, piped."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from milestones.manifest import Course

pytestmark = pytest.mark.usefixtures("warm")

ROOT = Path(__file__).resolve().parents[2]
STUB = '        raise NotImplementedError("m1.1: Pool.take")'


def course(sample: Course, *words: str, status: int = 0, typed: str = "") -> str:
    """Run `python -m milestones` in the sample's folder; returns what it printed."""
    command = [sys.executable, "-m", "milestones", *words]
    done = subprocess.run(
        command, cwd=sample.root, capture_output=True, text=True, input=typed, env=environment(sample)
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def environment(sample: Course) -> dict[str, str]:
    path = os.pathsep.join([str(sample.root), str(ROOT)])
    return {k: v for k, v in os.environ.items() if k != "FOLOVLLM_MINE"} | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}


def solve(sample: Course) -> None:
    file = sample.root / "mine" / "folovllm" / "pool.py"
    answer = "        if not self.free:\n            raise Empty\n        return self.free.popleft()"
    file.write_text(file.read_text().replace(STUB, answer))


def test_the_way_through(sample: Course) -> None:
    assert "Next: python -m milestones start m1" in course(sample)
    assert "folovllm/pool.py: new, 2 to write, 1 more for later milestones" in course(sample, "start", "m1")
    assert "Next: m1.1 Take" in course(sample)
    assert "m1.1 Pool.take is not written yet" in course(sample, "test", "m1.1", status=1)
    solve(sample)
    assert "1 passed" in course(sample, "test", "m1.1")
    assert "Next: m1.2 Give" in course(sample)
    state = course(sample, "status")
    assert "passing" in state and "not written" in state and "not started" in state
    assert "m1.2 Pool.give  not written  mine/folovllm/pool.py:2" in course(sample, "test", status=1)
    assert "pasted" in course(sample, "show", "m1.2", "--yes", "--paste")
    assert "Next: python -m milestones start m2" in course(sample)
    course(sample, "reset", "m1.1", "--yes")
    assert STUB in (sample.root / "mine/folovllm/pool.py").read_text()
    assert "up to date" in course(sample, "update")


def test_the_last_exercise_brings_the_whole_milestone(sample: Course) -> None:
    course(sample, "start", "m1")
    course(sample, "show", "m1.2", "--yes", "--paste")
    file = sample.root / "mine/folovllm/pool.py"
    file.write_text(file.read_text().replace(STUB, "        return self.free.popleft()"))  # wrong: never Empty
    assert "last exercise" not in course(sample, "test", "m1.2", "-q")  # who says what is to run gets that
    said = course(sample, "test", "m1.2", status=1)
    assert "All of m1 is written, but m1.1 fails: python -m milestones test m1.1" in said
    assert "That was the last" not in said, "while an exercise fails, its own tests say more, and sooner"
    course(sample, "show", "m1.1", "--yes", "--paste")
    said = course(sample, "test", "m1.2")
    assert "That was the last exercise of m1" in said and "m1 passes, all of it" in said
    assert "All that you started is written. m1 has passed." in course(sample)
    assert "last exercise" not in course(sample, "test", "m1.2")
    course(sample, "reset", "m1.1", "--yes")
    solve(sample)
    assert "m1 passes, all of it" in course(sample, "test", "m1.1")


def test_a_milestone_that_passed_is_not_tested_again_unasked(sample: Course) -> None:
    course(sample, "start", "m1")
    for exercise in ("m1.1", "m1.2"):
        course(sample, "show", exercise, "--yes", "--paste")
    assert "All that you started is written. Does it hold?" in course(sample)
    assert "m1 passes, all of it" not in course(sample, "test", "m1", "-q")
    assert "m1 passes, all of it" in course(sample, "test", "m1")
    assert "m1 has passed" in course(sample)
    assert "last exercise" not in course(sample, "test", "m1.2")


def test_what_failed_is_not_forgotten(sample: Course) -> None:
    course(sample, "start", "m1")
    file = sample.root / "mine/folovllm/pool.py"
    file.write_text(file.read_text().replace(STUB, "        return self.free.popleft()"))  # wrong: never Empty
    course(sample, "test", "m1.1", status=1)
    said = course(sample)
    assert said.index("m1.1 is written, and failed") < said.index("Next: m1.2"), "the next is not all there is to do"
    course(sample, "reset", "m1.1", "--yes")
    assert "and failed when" not in course(sample), "who begins again has not failed"
    solve(sample)
    course(sample, "test", "m1.1")
    assert "and failed when" not in course(sample)


def test_hints_come_one_by_one(sample: Course) -> None:
    for shown in (1, 2, 3, 3):
        assert f"{shown} of 3 hints" in course(sample, "hint", "m2.1")
    assert "Nearly the code" in course(sample, "hint", "m1.1", "--all")


def test_show_asks_first(sample: Course) -> None:
    assert "popleft" not in course(sample, "show", "m1.1", typed="n\n", status=1)
    assert "popleft" in course(sample, "show", "m1.1", typed="y\n")


def test_explain_waits_until_yours_passes(sample: Course) -> None:
    refused = "and this would give the answer away: python -m milestones hint m1.1 says less, and --anyway shows it"
    assert f"your m1.1 is not started, {refused}" in sentence(sample, "explain", "m1.1")
    course(sample, "start", "m1")
    assert f"your m1.1 is not written, {refused}" in sentence(sample, "explain", "m1.1")
    file = sample.root / "mine/folovllm/pool.py"
    file.write_text(file.read_text().replace(STUB, "        return self.free.popleft()"))  # wrong: never Empty
    assert f"your m1.1 is failing, {refused}" in sentence(sample, "explain", "m1.1")
    course(sample, "reset", "m1.1", "--yes")
    solve(sample)
    assert "Why the reference does it so: python -m milestones explain m1.1" in course(sample, "test", "m1.1")
    said = course(sample, "explain", "m1.1")
    assert said == course(sample, "explain", "m1.1", "--anyway")
    code, remark = said.index("return self.free.popleft()\n"), said.index("The first that came back is the first to go")
    assert code < remark, "a remark stands under its line"
    assert "raise Empty" in said and "  │ `raise Empty(`: Whoever asks" in said, "the reference, not what was written"
    assert f"Yours: {file}:16" in said


def test_explain_all_the_same(sample: Course) -> None:
    said = course(sample, "explain", "m1.1", "--anyway")
    assert "popleft" in said and "Yours" not in said
    assert "no exercise 'm1.7'" in sentence(sample, "explain", "m1.7", "--anyway")


def test_read_marks_what_is_new(sample: Course) -> None:
    said = course(sample, "read", "m2")
    names = ["LLM.generate", "Pool.take", "Pool.share", "LLM.__init__", "Pool.__init__"]
    assert sorted(names, key=lambda name: said.index(f" {name} ")) == names
    assert f"Pool.share  folovllm/pool.py:{line_of(sample, 'share')}  Split what is free into" in said
    assert next(line for line in said.splitlines() if "Pool.share" in line).endswith("  m2.1")
    assert [line.split()[1] for line in said.splitlines() if line.startswith("+")] == ["Pool.share"]
    assert "+" not in course(sample, "read", "m1")


def test_read_leaves_out_checks_unless_all_is_asked_for(sample: Course) -> None:
    pool = sample.root / "folovllm" / "pool.py"
    text = pool.read_text().replace("range(size)", "range(check_size(size))")
    pool.write_text(text + "\n\ndef check_size(n):\n    return inner(n)\n\n\ndef inner(n):\n    return n\n")
    short, whole = course(sample, "read", "m1"), course(sample, "read", "m1", "--all")
    assert "check_size" not in short and "2 more that check or report: --all" in short
    (line,) = (line for line in short.splitlines() if " inner " in line)
    (above,) = (line for line in short.splitlines() if " Pool.__init__ " in line)
    indents = [len(text) - len(text.lstrip()) for text in (above, line)]
    assert indents[1] == indents[0] + 2, "a function moves to the left by those above it that are left out"
    assert " check_size " in whole and " inner " in whole


def test_read_leaves_out_what_an_import_does(sample: Course) -> None:
    """Such a function is called by no request; one that both call is shown where the request calls it."""
    pool = sample.root / "folovllm" / "pool.py"
    both = "\n\ndef both(n):\n    return n\n\n\ndef early(n):\n    return both(n)\n\n\nMOST = early(3)\n"
    pool.write_text(pool.read_text().replace("range(size)", "range(both(size))") + both)
    said = course(sample, "read", "m1")
    assert " early " not in said and said.index(" Pool.__init__ ") < said.index(" both ")


def line_of(sample: Course, name: str) -> int:
    lines = sample.source(Path("folovllm/pool.py")).split("\n")
    return next(n for n, line in enumerate(lines, 1) if f"def {name}(" in line)


def sentence(sample: Course, *words: str) -> str:
    """What a command that refuses says, in one line."""
    said = course(sample, *words, status=2)
    assert said.startswith("error: ") and len(said.splitlines()) == 1
    return said


@pytest.mark.parametrize("words", [("hint", "m7.1"), ("start", "m7"), ("reset", "m1.1", "--yes")])
def test_a_users_mistake_is_one_sentence(sample: Course, words: tuple[str, ...]) -> None:
    sentence(sample, *words)


@pytest.mark.parametrize("words", [("test", "m2"), ("test", "m2.1"), ("watch", "m2.1")])
def test_what_is_not_started_is_not_tested(sample: Course, words: tuple[str, ...]) -> None:
    course(sample, "start", "m1")
    assert "python -m milestones start m2" in sentence(sample, *words)


def test_a_hint_before_the_start_is_no_start(sample: Course) -> None:
    course(sample, "hint", "m1.1")
    assert "python -m milestones start m1" in sentence(sample, "test", "m1.1")


def test_a_file_that_is_gone_is_not_written(sample: Course) -> None:
    course(sample, "start", "m1")
    course(sample, "start", "m2")
    (sample.root / "mine/folovllm/pool.py").unlink()
    gone = "folovllm/pool.py is missing from mine/: `python -m milestones start m1` brings it back"
    said = course(sample)
    assert gone in said and "■" not in said and "Next: m1.1" in said
    said = course(sample, "test", "m1.1", status=1)
    assert gone in said and "passed" not in said
    said = course(sample, "status")
    assert gone in said and "passing" not in said and said.count("│ missing") == 3
    course(sample, "start", "m1")
    assert "is not written yet" in course(sample, "test", "m1.1", status=1)


def test_damage_is_named(sample: Course) -> None:
    course(sample, "start", "m1")
    mine = sample.root / "mine"
    for notes in ("{", '{"foo": 1}', "[]"):
        (mine / ".course.json").write_text(notes)
        for words in ((), ("status",), ("test",), ("start", "m1"), ("hint", "m1.1")):
            assert f"{mine / '.course.json'} is damaged: delete it" in sentence(sample, *words)
    (mine / ".course.json").unlink()
    course(sample, "start", "m1")
    (mine / "folovllm/pool.py").write_bytes(b"caf\xe9")
    for words in ((), ("status",), ("start", "m1"), ("reset", "m1.1", "--yes")):
        assert f"{mine / 'folovllm/pool.py'} is not UTF-8" in sentence(sample, *words)
    said = course(sample, "test", "m1.1", status=4)
    assert f"{mine / 'folovllm/pool.py'} is not UTF-8" in said and "Traceback" not in said


def test_mine_is_a_file(sample: Course) -> None:
    (sample.root / "mine").write_text("")
    for words in ((), ("start", "m1"), ("hint", "m1.1"), ("test",)):
        assert f"{sample.root / 'mine'} is a file where your folder has to be: move it away" in sentence(sample, *words)


def test_who_has_yesterdays_files_is_told_to_update(sample: Course) -> None:
    """In the place of what would fail for reasons that are nobody's fault."""
    course(sample, "start", "m1")
    file = sample.root / "folovllm/pool.py"
    file.write_text(file.read_text().replace("class Empty", "class Exhausted"))
    old = sample.root / "mine/folovllm/pool.py"
    told = f"error: the reference has changed since {old} was copied: python -m milestones update\n"
    for words in ("", "start m2", "test m1.1", "hint m1.1"):
        assert sentence(sample, *words.split()) == told
    assert "folovllm/pool.py: updated" in course(sample, "update")
    assert "1 of 3 hints" in course(sample, "hint", "m1.1")


def test_watch_reruns_on_save_and_goes_on(sample: Course, tmp_path: Path) -> None:
    course(sample, "start", "m1")
    log = (tmp_path / "log").open("w+")
    command = [sys.executable, "-m", "milestones", "watch", "m1.1"]
    child = subprocess.Popen(command, cwd=sample.root, stdout=log, stderr=log, env=environment(sample))
    try:
        wait_for(log.name, "1 failed")
        solve(sample)
        assert child.wait(timeout=30) == 0
    finally:
        child.kill()
    assert "m1.1 Pool.take passes." in Path(log.name).read_text()


def wait_for(file: str, text: str) -> None:
    for _ in range(150):
        if text in Path(file).read_text():
            return
        time.sleep(0.2)
    raise AssertionError(Path(file).read_text())
