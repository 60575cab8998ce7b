"""Where nothing can fork (Windows, macOS): a process that has imported the libraries waits for each run of pytest."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from milestones import warm
from milestones.manifest import Course

ROOT = Path(__file__).resolve().parents[2]
FEW = "from milestones import warm\nwarm.LIBRARIES = ['pytest', 'hypothesis']\n"  # torch takes seconds, and shows nothing more
TEST = """
import os, subprocess, sys, time

def test_word():
    print("by", os.getppid(), os.getpid())
    assert "hypothesis" in sys.modules and "milestones.spare" not in sys.modules and "folovllm" not in sys.modules
    assert os.environ["WORD"] == "good", os.environ["WORD"]

def test_without_end():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open("pids", "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
"""
WORDS = ["-q", "-s", "-p", "no:cacheprovider"]


@pytest.fixture
def environment(sample: Course, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What a run has; processes wait in a folder of their own, and are ended afterwards."""
    monkeypatch.setenv("FOLOVLLM_WARM", "spawn")
    monkeypatch.setattr(warm.tempfile, "gettempdir", lambda: str(sample.root))
    (sample.root / "sitecustomize.py").write_text(FEW)
    (sample.root / "test_run.py").write_text(TEST)
    yield {**os.environ, "PYTHONPATH": os.pathsep.join([str(sample.root), str(ROOT)]), "WORD": "good"}
    for port in waiting():
        socket.create_connection(("127.0.0.1", port)).close()  # whoever does not know the secret ends it


def waiting() -> list[int]:
    """The ports of the processes that nobody has taken."""
    return [json.loads(file.read_text())[0] for file in warm.private_folder().glob("*.json")]


def test_each_run_has_a_process_and_leaves_one_for_the_next(
    sample: Course, environment: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    """It passes on arguments, environment, status and output, to a file and to our own."""
    pids = []
    for word, status in (("good", 0), ("bad", 1)):
        with (sample.root / "said").open("w+") as said:
            words = [*WORDS, "test_run.py::test_word"]
            assert warm.run(words, sample.root, environment | {"WORD": word}, said) == status
            said.seek(0)
            text = said.read()
        assert ("AssertionError: bad" in text) is (word == "bad"), text
        pids.append(text.partition("by ")[2].split()[1])
    assert warm.run([*WORDS, "test_run.py::test_word"], sample.root, environment) == 0
    shown = capfd.readouterr().out
    assert "1 passed" in shown
    pids.append(shown.partition("by ")[2].split()[1])
    assert len({*pids}) == 3, "each run has a process of its own: what one left in memory is not the next one's"


def test_a_run_without_end_is_ended_with_all_that_it_started(sample: Course, environment: dict[str, str]) -> None:
    with (sample.root / "said").open("w+") as said:
        words = [*WORDS, "test_run.py::test_without_end"]
        assert warm.run(words, sample.root, environment, said, limit=10) == warm.OUT_OF_TIME
    pids = [int(pid) for pid in (sample.root / "pids").read_text().split()]
    for _ in range(100):
        if not any(map(is_running, pids)):
            return
        time.sleep(0.1)
    raise AssertionError(f"of the processes {pids} one is still there")


def is_running(pid: int) -> bool:
    """Whether a process runs; one that is dead and that nobody has asked for does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_debugger_needs_the_terminal(environment: dict[str, str]) -> None:
    assert warm.run(["--pdb"], Path(), environment) is None and not waiting()
