"""`folovllm inspect` in a process of its own, also on a learner's code: a mistake is seen, and mended without a new start."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from folovllm.apps.inspector.lines import Recording
from folovllm.apps.inspector.watcher import Watched
from tests.helpers import tiny_checkpoint
from tests.inspector.browser import SAMPLES
from tests.inspector.test_live import looking
from tests.inspector.test_recording import replayed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]
REFERENCE = Path(__file__).parents[2] / "folovllm" / "engine" / "scheduler.py"
ASKED = {"prompts": ["Once upon", "The sea"], "max_tokens": 40, "seed": 1}
SMALL = ["--milestone", "m3", "--num-kv-blocks", "6", "--block-size", "8", "--max-num-seqs", "4"]


def post(url: str, body: dict[str, Any]) -> Any:
    return httpx.post(url, json=body, timeout=60).json()


FREES = "    scheduler.kv.free(victim)\n    victim.requeue()"
MISTAKES = {"keeps": "    victim.requeue()", "loops": "    while True:\n        pass", "is none": "    if"}


@contextmanager
def inspecting(*arguments: str, **environment: str) -> Iterator[str]:
    """`folovllm inspect`, which ends at Ctrl-C; its address."""
    command = [sys.executable, "-m", "folovllm", "inspect", *arguments, "--port", "0", "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        assert process.stdout
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address
        yield address[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@contextmanager
def playing(mine: Path) -> Iterator[str]:
    """The playground on a learner's code, once its engine is there; its address."""
    with inspecting(*SMALL, "--no-use-tqdm", FOLOVLLM_MINE=str(mine), OMP_NUM_THREADS="1") as address:
        while httpx.get(f"{address}/playground", timeout=60).json()["loading"]:
            time.sleep(0.1)
        post(f"{address}/playground/pace", {"delay": 0})
        yield address


@pytest.mark.parametrize("kind", ["playground", "files"])
def test_a_server_of_its_own(kind: str) -> None:
    """It says where it is, and Ctrl-C ends it, with a reader attached."""
    of_its_own = ["--milestone", "m3", "--model", str(tiny_checkpoint()), "--device", "cpu", "--no-use-tqdm"]
    with inspecting(*(of_its_own if kind == "playground" else [str(SAMPLES / "m2.jsonl")])) as address:
        assert f'"kind":"{kind}"' in httpx.get(address).text
        if kind == "playground":
            with looking(address) as looker:
                assert "folovllm recording" in looker.lines[0]


def write(file: Path, mistake: str | None) -> None:
    """A scheduler with a mistake in its `preempt`, or with none."""
    source = REFERENCE.read_text(encoding="utf-8")
    assert source.count(FREES) == 1
    file.write_text(source if mistake is None else source.replace(FREES, MISTAKES[mistake]), encoding="utf-8")


def preempted(address: str) -> tuple[Recording, list[Watched]]:
    """What the page sees up to the first turn with a preemption, and who waits then."""
    with looking(address) as looker:
        post(f"{address}/playground/prompts", ASKED)
        looker.read_until(lambda line: '["Preempted"' in line)
    watcher = replayed(found := looker.recording())
    victims = [seq for seq in watcher.sequences.values() if not seq.is_running]
    assert victims and all(watcher.cells[block].ref_count for seq in victims for block in seq.block_table)
    return found, victims


def test_mistakes_are_seen_and_mended_without_a_new_start(tmp_path: Path) -> None:
    """One that shows, one that never ends, and what is no code at all."""
    scheduler_file = tmp_path / "folovllm" / "engine" / "scheduler.py"
    scheduler_file.parent.mkdir(parents=True)
    write(scheduler_file, "keeps")
    with playing(tmp_path) as address:
        found, victims = preempted(address)
        assert found.header["engine"]["mine"] is True
        assert all(seq.block_table for seq in victims), "they wait, and hold blocks"
        write(scheduler_file, None)
        assert post(f"{address}/playground", {})["mine"] == 1
        assert not any(seq.block_table for seq in preempted(address)[1])
        write(scheduler_file, "loops")
        assert post(f"{address}/playground", {})["mine"] == 1
        post(f"{address}/playground/prompts", ASKED)
        with looking(address) as looker:
            write(scheduler_file, "is none")
            assert "ended" in post(f"{address}/playground", {})["error"]["message"]
            write(scheduler_file, None)
            post(f"{address}/playground", {})
            looker.read_until(lambda line: line.startswith("{"))  # the reader of the old one begins anew
        assert not any(seq.block_table for seq in preempted(address)[1])
