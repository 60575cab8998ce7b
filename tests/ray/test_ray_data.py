"""`examples/ray_data.py` with real Ray: an engine is killed among its prompts, and each prompt has its one answer."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from folovllm.models.files import resolve_model
from tests.helpers import hf_greedy, margins, tolerance
from tests.ray.cluster import EXAMPLES, PATIENCE, Ray, eventually

pytest.importorskip("ray.data", reason='needs Ray: pip install "folovllm[ray]"')
pytestmark = [
    pytest.mark.timeout(500),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc"),
]
ENDS = (0, 2)  # the embedded model's end-of-text ids
PROMPTS = [f"Once upon a time there was a cat called {name}{i}" for i in range(80) for name in ("Tom", "Mia")]


def engines(ancestor: int) -> list[int]:
    """The processes of Ray's actors that hold an engine, among those that descend from a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended

    def descends(pid: int) -> bool:
        return pid == ancestor or (pid in parents and descends(parents[pid]))

    return [pid for pid in parents if descends(pid) and re.match("ray::.*Answerer", title(pid))]


def title(pid: int) -> str:
    """What a process calls itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def answers(folder: Path) -> list[tuple[str, str]]:
    """Prompts with their answers, as far as they are written."""
    files = [file for file in sorted(folder.rglob("*.json")) if file.is_file()]
    whole = [line for file in files for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    lines = [json.loads(line) for line in whole]
    return [(line["text"], line["answer"]) for line in lines]


def test_an_engine_is_killed(ray: Ray, tmp_path: Path) -> None:
    """No prompt is lost, none is answered twice, and the answers are the reference's."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    out = tmp_path / "answers"
    command = [sys.executable, str(EXAMPLES / "ray_data.py"), str(tmp_path / "prompts.txt"), str(out)]
    command += ["--engines", "2", "--device", "cpu", "--batch-size", "4"]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, env=ray.variables, stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: answers(out) or process.poll() is not None)
            before = engines(ray.pid)
            assert len(before) == 2 and len(answers(out)) < len(PROMPTS)
            os.kill(before[0], signal.SIGKILL)
            assert process.wait(2 * PATIENCE) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
    found = answers(out)
    assert sorted(text for text, _ in found) == sorted(PROMPTS)
    for prompt, answer in found[::20]:
        assert answer.startswith(sure_beginning(prompt)), prompt


def sure_beginning(prompt: str) -> str:
    """What the reference's answer begins with, up to the first close call."""
    path = resolve_model("stories-5m")
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokens, logits = hf_greedy(path, tokenizer(prompt).input_ids, 64)
    sure = (margins(logits) > 2 * tolerance(logits)).tolist()
    ends = [*(i for i, token in enumerate(tokens) if token in ENDS or not sure[i]), len(tokens)]
    return str(tokenizer.decode(tokens[: ends[0]], skip_special_tokens=True))
