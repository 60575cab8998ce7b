"""A Ray of our own for one test run: logical CPUs, a folder that goes, no report to anybody."""

from __future__ import annotations

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
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
PATIENCE = 120.0  # seconds until a test gives up: engines start slowly on a busy machine
LOGICAL_CPUS = 4
T = TypeVar("T")


@contextmanager
def environment() -> Iterator[dict[str, str]]:
    """Variables for a program that starts its own Ray, and finds no other. Its sockets want a short path."""
    folder = tempfile.mkdtemp(prefix="ray")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "FOLOVLLM_", "PYTEST_"))}
    own = {
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_OVERRIDE_RESOURCES": f'{{"CPU": {LOGICAL_CPUS}}}',
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }
    try:
        yield kept | own
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # its last processes may still write their logs


@contextmanager
def running(script: str, *arguments: str, says: str) -> Iterator[re.Match[str]]:
    """An example that runs, once it has printed what matches `says`; ended by Ctrl-C, with all that belongs to it."""
    with environment() as variables, tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, str(EXAMPLES / script), *arguments]
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)

        def look() -> re.Match[str] | None:
            log.seek(0)
            text = log.read()
            assert process.poll() is None, f"{script} has ended:\n{text[-3000:]}"
            return re.search(says, text, re.MULTILINE)

        try:
            yield eventually(look)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()  # Ray's processes go with it
            process.wait()


def eventually(look: Callable[[], T | None]) -> T:
    """What `look` finds, as soon as it does."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.05)
    return found
