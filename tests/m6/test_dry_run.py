"""A dry run compiles what a thread launches, many kernels at once, and launches nothing. No GPU needed."""

from __future__ import annotations

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
from tests.m6.test_tensor_parallel_end import assert_gone

ROOT = Path(__file__).parents[2]


def begin(what: str, folder: Path) -> subprocess.Popen[str]:
    """Start `dry_run_kernels`, with a cache of its own for Triton."""
    pytest.importorskip("triton.compiler")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, "-m", "tests.m6.dry_run_kernels", what]
    return subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What it finds."""
    with begin("runs", tmp_path_factory.mktemp("cache")) as process:
        out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    assert "Traceback" not in err, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.slow
def test_dry_run(found: dict[str, Any]) -> None:
    assert found["launched in the dry run"] == ["other"], "only another thread launches, and that as ever"
    assert found["written"] == 0, "what a kernel would have written is zero"
    assert found["compiled in the dry run"] == 3 + 1, "of four lengths three variants, each once; the other thread's"
    assert found["loaded"] == 3 + 1, "the first launch finds its kernel on the device"
    assert (found["launched"], found["compiled later"]) == (4, 0)
    assert found["wrong here"] == "CompilationError", "what the compiler says reaches the caller"
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


@pytest.mark.slow
def test_other_processes_compile(found: dict[str, Any]) -> None:
    new = found["new"]
    assert (new["here"], new["loaded"]) == ([], 2) and new["begun"] in (1, 2), "other processes compile, this one loads"
    assert found["known"] == {"here": [], "begun": 0, "left": [], "loaded": 2}, "none is begun for what the cache has"
    assert found["not of the package"] == ["", ["copy_kernel"]], "to import another module might do things"
    assert found["killed"] == {"here": ["act_and_mul_kernel"], "left": []}, "who loses a process compiles here"
    assert found["gone"] == "BrokenPipeError", "to send to one that is gone ends no program"
    assert found["no Python is known"] == {"here": ["act_and_mul_kernel"], "begun": 0, "left": [], "loaded": 1}
    assert found["wrong"] == "CompilationError", "what the compiler says reaches the caller"
    assert found["interrupted"] == "KeyboardInterrupt"
    assert new["left"] == found["left"] == [], "no process is left"
    after = "a dry run that failed does not stand in the next one's way"
    assert found["once more"] == {"here": [], "begun": 1, "left": [], "loaded": 2}, after


@pytest.mark.slow
def test_the_others_end_with_this_process(tmp_path: Path) -> None:
    with begin("end", tmp_path) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        os.kill(other, 0)
        process.kill()
    assert_gone([other])  # it may be in the middle of a kernel


@pytest.mark.slow
def test_kernels_need_no_torch() -> None:
    """Where kernels are compiled, torch is a stub with nothing behind it."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.kernel_modules"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
