"""Data parallelism by Ray Data: two engines on CPU, each answer with its prompt, none lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from folovllm import LLM, SamplingParams

pytest.importorskip("ray", reason="needs Ray: pip install 'ray[data]'")
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_data.py"


@pytest.mark.timeout(200)
def test_two_actors(tmp_path: Path) -> None:
    prompts = [f"Lily found {number} red kites." for number in range(12)]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    command = [sys.executable, EXAMPLE, tmp_path / "prompts.txt", tmp_path / "answers", "--engines", "2"]
    done = subprocess.run(
        [str(part) for part in [*command, "--device", "cpu", "--batch-size", "2"]],
        capture_output=True, text=True, timeout=180, env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    files = (tmp_path / "answers").glob("*.json")
    answers = {row["text"]: row["answer"] for file in files for row in map(json.loads, file.read_text().splitlines())}
    with LLM(device="cpu", use_tqdm=False) as llm:
        expected = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64), use_tqdm=False)
    assert answers == {prompt: output.outputs[0].text for prompt, output in zip(prompts, expected, strict=True)}
