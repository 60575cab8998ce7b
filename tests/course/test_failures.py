"""What a learner reads when a test fails: the first cause and the own line, not the machinery between; and of a file that is no Python."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from milestones import warm
from milestones.failures import told
from milestones.manifest import Course
from tests.course.test_cli import STUB, course

pytestmark = pytest.mark.usefixtures("warm")


def write(sample: Course, body: str) -> None:
    file = sample.root / "mine" / "folovllm" / "pool.py"
    file.write_text(file.read_text().replace(STUB, body))


class Wrapped(Exception):
    """As Triton's interpreter wraps what a kernel raises, once for each function."""


def test_the_first_cause_and_the_learners_lines(tmp_path: Path) -> None:
    mine, tests = tmp_path / "mine", tmp_path / "tests"
    for folder, name, text in (
        (mine, "kernel.py", "def kernel(x):\n    return x.to(float)\n"),
        (tests, "test_kernel.py", "def test_it(call):\n    call(None)\n"),
    ):
        folder.mkdir()
        (folder / name).write_text(text)
    own, test = ({}, {})
    for names, file in ((own, mine / "kernel.py"), (test, tests / "test_kernel.py")):
        exec(compile(file.read_text(), file, "exec"), names)

    def run(x: object) -> None:
        try:
            own["kernel"](x)
        except AttributeError as error:
            raise Wrapped(repr(error)) from error

    with pytest.raises(Wrapped) as caught:
        test["test_it"](run)
    lines = told(caught.value, mine, tests).splitlines()
    assert lines[0] == "AttributeError: 'NoneType' object has no attribute 'to'"
    assert [line.strip() for line in lines[2::2]] == ["return x.to(float)", "call(None)"]
    assert "kernel.py:2, kernel" in lines[1] and "test_kernel.py:2, test_it" in lines[3] and len(lines) == 5
    caught.value.__cause__ = AttributeError("'InterpreterBuilder' object has no attribute 'get_bf16'")
    assert told(caught.value, tmp_path / "elsewhere", tests) == "", (
        "where no line of the learner's is, pytest says more"
    )
    assert "widen with" in told(caught.value, tests, tests)


def test_an_assertion_is_its_sentence_and_its_line(tmp_path: Path) -> None:
    """No frame of a helper is shown, and of what pytest adds no line that fills a screen."""
    said = "5 tokens are enough\nassert 6 == 5\n  " + 999 * "Step" + "\n +  where 6 = Trace()"
    (tmp_path / "helper.py").write_text(f"def check():\n    raise AssertionError({said!r})\n")
    (tmp_path / "test_it.py").write_text("def test_it(check):\n    check()\n")
    names: dict[str, Callable[..., None]] = {}
    for file in tmp_path.glob("*.py"):
        exec(compile(file.read_text(), file, "exec"), names)
    with pytest.raises(AssertionError) as caught:
        names["test_it"](names["check"])
    lines = told(caught.value, tmp_path / "mine", tmp_path).splitlines()
    assert lines[:2] == ["AssertionError: 5 tokens are enough", "assert 6 == 5"] and len(lines[2]) < 210
    assert "test_it.py:2, test_it" in lines[3] and lines[4].strip() == "check()" and len(lines) == 5


def test_what_a_test_says_itself_is_all(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        try:
            raise KeyError(7)
        except KeyError:
            pytest.fail("`run` let an exception out", pytrace=False)
    assert told(caught.value, tmp_path, tmp_path) == "`run` let an exception out"


def test_an_error_in_mine_is_a_few_lines(sample: Course) -> None:
    course(sample, "start", "m1")
    write(sample, "        return self.fre.popleft()")
    said = course(sample, "test", "m1.1", status=1)
    assert "AttributeError: 'Pool' object has no attribute 'fre'" in said
    assert "mine/folovllm/pool.py" in said and "return self.fre.popleft()" in said
    assert "self = <" not in said, "no page of arguments and of lines around it"


def test_a_file_that_is_no_python_is_said_everywhere(sample: Course) -> None:
    course(sample, "start", "m1")
    write(sample, "        return (self.free")
    for words, status in ((["test", "m1.1"], 4), ([], 0), (["status", "--no-tests"], 0), (["status"], 0)):
        said = course(sample, *words, status=status)
        assert "pool.py:" in said and "does not parse: '(' was never closed" in said, words
    state = course(sample, "status", "--no-tests")
    assert "does not parse" in state and "written" not in state.replace("not written", "")


def test_a_run_is_a_fork_of_a_process_that_has_the_libraries(
    sample: Course, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It passes on arguments, environment, status and output, and serves one run after another."""
    monkeypatch.delenv("FOLOVLLM_WARM", raising=False)
    short = tmp_path_factory.mktemp("s")  # the name of a socket has at most 107 bytes
    monkeypatch.setattr(warm.tempfile, "gettempdir", lambda: str(short))
    (sample.root / "test_fork.py").write_text(
        "import os, sys\n"
        "def test_it():\n"
        "    assert 'hypothesis' in sys.modules and 'folovllm' not in sys.modules\n"
        "    assert os.environ['WORD'] == 'good', os.environ['WORD']\n"
    )
    environment = {**os.environ, "WORD": "good"}
    command = [sys.executable, warm.__file__, str(warm.address(environment))]
    server = subprocess.Popen(command, env=environment)
    try:
        for word, status in (("good", 0), ("bad", 1), ("good", 0)):
            with (sample.root / "said").open("w+") as said:
                words = ["-q", "-p", "no:cacheprovider", "test_fork.py"]
                assert warm.run(words, sample.root, environment | {"WORD": word}, said) == status
                said.seek(0)
                assert ("AssertionError: bad" in said.read()) is (word == "bad")
    finally:
        server.terminate()
        server.wait()


def test_where_it_is_switched_off_nothing_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLOVLLM_WARM", "0")
    assert warm.run([], Path(), {}) is None
