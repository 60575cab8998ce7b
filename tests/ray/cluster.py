"""One Ray of our own for all tests: logical CPUs, a folder that goes, no report to anybody."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ATTEMPTS = 4  # to start a cluster
PATIENCE = 120.0  # seconds until a test gives up: engines start slowly on a busy machine
LOGICAL_CPUS = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ray:
    """A cluster that runs, as `ray start --head` makes it."""

    pid: int  # of the process that all others of the cluster descend from
    variables: dict[str, str]  # with which a program finds this cluster, and no other


@contextmanager
def started() -> Iterator[Ray]:
    """A cluster on this machine without a dashboard, which all tests share: to start one takes half a minute of CPU time."""
    folder = tempfile.mkdtemp(prefix="ray")  # Ray's sockets want a short path
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FOLOVLLM_", "PYTEST_"))}
    own = {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        while not (processes and is_up(processes[-1], Path(folder) / "log")):
            assert len(processes) < ATTEMPTS, (Path(folder) / "log").read_text()[-3000:]
            processes.append(head(kept | own, Path(folder) / "log"))
        yield Ray(processes[-1].pid, kept | own)
    finally:
        for process in processes:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)  # its last processes may still write their logs


def head(variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """`ray start --head`, in a session of its own: Linux shares a core fairly between sessions."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"]
    command += [f"--num-cpus={LOGICAL_CPUS}", "--include-dashboard=false"]
    with log.open("w") as file:
        return subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def is_up(process: subprocess.Popen[bytes], log: Path) -> bool:
    """Whether a head says that it runs. On a busy machine it may end instead: Ray gives its parts 30 seconds to start."""
    eventually(lambda: process.poll() is not None or "Ray runtime started" in log.read_text())
    return process.poll() is None


@contextmanager
def running(ray: Ray, script: str, *arguments: str, says: str) -> Iterator[re.Match[str]]:
    """An example that runs, once it has printed what matches `says`; ended by Ctrl-C, with all that belongs to it."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, str(EXAMPLES / script), *arguments]
        process = subprocess.Popen(command, env=ray.variables, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield eventually(lambda: said(process, log, says))
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
            process.wait()


def said(process: subprocess.Popen[bytes], log: TextIO, pattern: str) -> re.Match[str] | None:
    """What matches in the log of a process that is to be alive."""
    log.seek(0)
    text = log.read()
    assert process.poll() is None, f"{process.args} has ended:\n{text[-3000:]}"
    return re.search(pattern, text, re.MULTILINE)


def eventually(look: Callable[[], T | None]) -> T:
    """What `look` finds, as soon as it does."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.05)
    return found
