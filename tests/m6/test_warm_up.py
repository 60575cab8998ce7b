"""Nothing is compiled once requests are served: the start has met every variant of every kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from folovllm.build import make_engine
from folovllm.config import EngineConfig
from folovllm.worker.warm_up import doublings, long_prompts
from tests.m6.traffic import ENGINES, FIELDS, kernels, serve_everything

ROOT = Path(__file__).parents[2]


def test_doublings() -> None:
    assert [doublings(n) for n in (1, 2, 3, 4, 20)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 4, 8, 16, 20]]


@pytest.mark.parametrize(
    ("max_model_len", "budget", "max_num_seqs", "lengths"),
    [(8192, 16_384, 4, [4096]), (1000, 16_384, 8, [1000] * 4 + [96]), (1000, 16_384, 3, [1000] * 3),
     (8192, 2048, 4, [2048]), (600, 1000, 4, [600, 400])],
)  # fmt: skip
def test_long_prompts(max_model_len: int, budget: int, max_num_seqs: int, lengths: list[int]) -> None:
    """The step is as large as a long one can be, and each share fits into the context, and all into the rows."""
    setup = SimpleNamespace(max_model_len=max_model_len, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    assert long_prompts(setup) == lengths


def test_the_start_meets_every_variant() -> None:
    """With no GPU: launches are noted, not done. `tests/m6/launch_variants.py` says how."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.m6.launch_variants"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == ENGINES.keys()
    for name, engine in found.items():
        assert engine["at start"] >= 9 and engine["steps"] >= 200, name
        assert not engine["later"], f"{name}: {engine['later']}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ENGINES)
def test_nothing_is_compiled_after_the_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton itself says what it compiles. What it knows from earlier tests it is made to forget first."""
    import triton

    all_kernels = list(kernels())
    assert len(all_kernels) >= 9
    for kernel in all_kernels:
        kernel.device_caches.clear()
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(f"{what['repr']} {what['key']}")
    )
    engine = make_engine(EngineConfig(**{**FIELDS, "dtype": "bfloat16"} | ENGINES[name]))
    assert len(compiled) >= 9, f"the hook saw {compiled}"
    compiled.clear()
    assert serve_everything(engine) >= 200
    engine.close()
    assert not compiled
