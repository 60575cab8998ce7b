"""A rehearsal compiles what a thread launches, many kernels at once, and launches nothing. No GPU needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from folovllm.layers.attention import Attention
from folovllm.worker.rehearse import one_layer_of_each_kind

ROOT = Path(__file__).parents[2]


def test_rehearsal(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.m6.rehearse_kernels"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["launched in the rehearsal"] == ["other"], "only another thread launches, and that as ever"
    assert found["written"] == 0, "what a kernel would have written is zero"
    assert found["compiled in the rehearsal"] == 3 + 1, (
        "of four lengths three variants, each once; and the other thread's"
    )
    assert found["loaded"] == 3 + 1, "the first launch finds its kernel on the device"
    assert (found["launched"], found["compiled later"]) == (4, 0)
    assert found["wrong"] == "CompilationError", "what the compiler says reaches the caller"
    assert found["interrupted"] == "KeyboardInterrupt"
    assert found["once more"] == "", "a rehearsal that failed does not stand in the next one's way"
    assert found["as before"], "Triton is left as it was"


def test_one_layer_of_each_kind() -> None:
    """Layers with another window, or with weights of another shape, are of another kind; the last one stays the last."""

    def layer(window: int | None, width: int) -> nn.Module:
        return nn.Sequential(Attention(window), nn.Linear(width, 2))

    model = nn.Module()
    model.layers = whole = nn.ModuleList(
        layer(*kind) for kind in ((8, 3), (8, 3), (None, 3), (8, 3), (8, 4), (None, 3))
    )
    with one_layer_of_each_kind(model):
        left = [(layer[0].window, layer[1].in_features) for layer in model.layers]
        assert left == [(8, 3), (None, 3), (8, 4), (None, 3)] and model.layers[-1] is whole[-1]
    assert model.layers is whole
