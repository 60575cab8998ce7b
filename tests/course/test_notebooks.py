"""Built notebooks are their sources', executed over a learner's folder, and the check notices when they are not."""

import json
import os
import subprocess
import sys
from pathlib import Path

from milestones.manifest import Course

ROOT = Path(__file__).resolve().parents[2]


def notebooks(sample: Course, *words: str) -> tuple[int, str]:
    kept = {k: v for k, v in os.environ.items() if k != "FOLOVLLM_MINE"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(sample.root), str(ROOT)])}
    command = [sys.executable, "-m", "milestones.notebooks", *words]
    done = subprocess.run(command, cwd=sample.root, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_build_then_check(sample: Course) -> None:
    source, built = sample.root / "notebooks/src/m1_pool.py", sample.root / "notebooks/m1_pool.ipynb"
    assert notebooks(sample, "--check") == (1, "notebooks/m1_pool.ipynb: was never built; run `make notebooks`\n")
    status, said = notebooks(sample)
    assert status == 0 and said.startswith("m1_pool.ipynb: 3 cells"), said
    cells = json.loads(built.read_text())["cells"]
    assert cells[1]["outputs"][0]["text"] == ["running: yours (2 of 2)\n"]
    assert cells[2]["outputs"][0]["data"]["text/plain"] == ["0"]
    assert notebooks(sample, "--check") == (0, "")
    source.write_text(source.read_text().replace("Pool(3)", "Pool(4)"))
    assert "its cells are not those of its source" in notebooks(sample, "--check")[1]
    source.write_text(source.read_text().replace("Pool(4).take()", "Pool(0).take()"))
    status, said = notebooks(sample, "m1_pool")
    assert status == 1 and "nothing left" in said
