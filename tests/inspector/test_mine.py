"""The playground on a learner's code: a mistake is seen in the stream."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from folovllm.engine import scheduler
from folovllm.inspector.replay import Recording, parse
from folovllm.watcher import Watcher

SMALL = ["--milestone", "m3", "--num-kv-blocks", "6", "--block-size", "8", "--max-num-seqs", "4"]


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def until_done(stream: Any, holds: Any) -> Recording:
    """The recording so far, as soon as a line is one that we wait for."""
    lines: list[str] = []
    for row in stream:
        text = row.decode().strip()
        if text.startswith("data: "):
            lines.append(text.removeprefix("data: "))
            if holds(lines[-1]):
                return parse("".join(f"{line}\n" for line in lines), "mine")
    raise AssertionError("the stream has ended")


def test_a_preempt_that_keeps_its_blocks_is_seen(tmp_path: Path) -> None:
    source = Path(inspect.getfile(scheduler)).read_text(encoding="utf-8")
    wrong = source.replace("    scheduler.kv.free(victim)\n    victim.requeue()", "    victim.requeue()")
    assert wrong != source
    mine = tmp_path / "mine" / "folovllm" / "engine"
    mine.mkdir(parents=True)
    (mine / "scheduler.py").write_text(wrong, encoding="utf-8")
    env = {**os.environ, "FOLOVLLM_MINE": str(tmp_path / "mine"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "folovllm", "inspect", *SMALL, "--port", "0", "--no-browser", "--no-use-tqdm"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address
        with urllib.request.urlopen(f"{address[0]}/events", timeout=60) as stream:
            post(f"{address[0]}/playground/pace", {"delay": 0})
            post(f"{address[0]}/playground/prompts", {"prompts": ["Once upon", "The sea"], "max_tokens": 40, "seed": 1})
            found = until_done(stream, lambda line: '["preempt"' in line)
    finally:
        process.kill()
        process.wait()
    assert found.header["engine"]["mine"] is True
    watcher = Watcher()
    for turn in found.turns():
        watcher(turn.events)
    (victim,) = (seq for seq in watcher.sequences.values() if not seq.is_running)
    assert victim.block_table, "it waits, and holds blocks"
    assert all(watcher.cells[block].ref_count for block in victim.block_table)
