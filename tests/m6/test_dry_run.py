"""A dry run compiles what a thread launches, many kernels at once, and launches nothing. No GPU needed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from folovllm.layers.attention import Attention
from folovllm.worker.dry_run import one_layer_of_each_kind

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    pytest.importorskip("triton.compiler")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.m6.dry_run_kernels"]
    process = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0 and "Traceback" not in process.stderr, process.stderr[-2000:]
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["launched in the dry run"] == ["other"], "only another thread launches, and that as ever"
    assert found["written"] == 0, "what a kernel would have written is zero"
    assert found["compiled in the dry run"] == 3 + 1, "of four lengths three variants, each once; the other thread's"
    assert found["loaded"] == 3 + 1, "the first launch finds its kernel on the device"
    assert found["launchers made at once"] == 1, "Triton imports all launchers under one name"
    assert (found["launched"], found["compiled later"]) == (4, 0)
    assert found["launched again"] == 0, "a kernel that is compiled already is not launched in a dry run either"
    assert found["wrong here"] == "CompilationError", "what the compiler says reaches the caller"
    assert found["interrupted"] == "KeyboardInterrupt"
    assert found["once more"] == "", "a dry run that failed does not stand in the next one's way"
    assert found["as before"], "Triton is left as it was"


def test_as_many_compile_as_a_container_has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as many as the machine has, and ranks share them."""
    pytest.importorskip("triton")
    from folovllm.kernels import dry_run

    asked: list[int] = []

    class Noted(dry_run.ThreadPoolExecutor):
        def __init__(self, max_workers: int, *rest: Any) -> None:
            asked.append(max_workers)
            super().__init__(max_workers, *rest)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(dry_run, "ThreadPoolExecutor", Noted)
    monkeypatch.setattr(dry_run, "num_cores", lambda: 4)
    for num_processes in (1, 2, 8):
        with dry_run.dry_run(torch.device("cpu"), num_processes):
            pass
    assert asked == [4, 2, 1]


def test_one_layer_of_each_kind() -> None:
    """Layers with another window, or with weights of another shape, are of another kind; the last one stays the last."""

    def layer(window: int | None, width: int) -> nn.Module:
        return nn.Sequential(Attention(window), nn.Linear(width, 2))

    model = nn.Module()
    model.layers = whole = nn.ModuleList(layer(*k) for k in ((8, 3), (8, 3), (None, 3), (8, 3), (8, 4), (None, 3)))
    with one_layer_of_each_kind(model):
        left = [(layer[0].window, layer[1].in_features) for layer in model.layers]
        assert left == [(8, 3), (None, 3), (8, 4), (None, 3)] and model.layers[-1] is whole[-1]
    assert model.layers is whole
