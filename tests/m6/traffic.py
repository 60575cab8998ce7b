"""Requests that take an engine through every kind of step, and a look at what Triton compiles meanwhile."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.sampling_params import SamplingParams
from tests.kernel_modules import kernel_modules

LENGTHS = [*range(1, 10), 15, 16, 17, 24, 31, 32, 33, 48, 49, 64, 65, 129]  # of prompts
FIELDS: dict[str, Any] = {"milestone": "m6", "max_model_len": 256, "max_num_seqs": 20, "attention_backend": "triton",
                          "max_num_batched_tokens": 96, "long_prefill_token_threshold": 50, "use_tqdm": False}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {  # what changes the way to the first request
    "m6": {},
    "no graphs": {"enforce_eager": True},
    "no memory profile": {"num_kv_blocks": 800},
    "three rows": {"max_num_seqs": 3},
    "one row": {"max_num_seqs": 1, "async_scheduling": False},
    "m5": {"milestone": "m5"},
}


def rows() -> list[SamplingParams]:
    """Every way to draw a token."""
    common = {"ignore_eos": True, "seed": 1}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=0.8, **common),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.01, **common),
        SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.1, **common),
        SamplingParams(temperature=0.0, logprobs=3, min_tokens=2, **common),
    ]


def serve_everything(engine: LLMEngine) -> int:
    """Prompts of many lengths, alone and together, in chunks, with prefixes that are cached; returns the steps taken.

    Answers end one after the other, so that decodes come in every batch size from all to one.
    """
    kinds, steps = rows(), 0
    for turn in range(3):
        for i, length in enumerate(LENGTHS):
            shared = turn == 1  # the prompts of the first turn, a little longer
            prompt = [(7 * i + j * j) % 97 + (0 if shared else turn) for j in range(length + shared)]
            params = replace(kinds[(i + turn) % len(kinds)], max_tokens=2 + i if turn < 2 else 3)
            engine.add_request(f"{turn} {i}", prompt, params, stream=False)
            if turn == 2:  # alone
                steps += drain(engine)
        steps += drain(engine)
    return steps


def drain(engine: LLMEngine) -> int:
    """Step until nobody is left."""
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    return steps


def kernels() -> Iterator[Any]:
    """Every function of the package that Triton made."""
    for module in kernel_modules():
        for value in vars(import_module(module)).values():
            if hasattr(value, "device_caches"):
                yield value


def assert_the_start_meets_every_variant(module: str, steps: int = 100) -> None:
    """With no GPU: launches are noted, not done. `tests/m6/launch_variants.py` says how; `module` has ENGINES."""
    pytest.importorskip("triton.compiler")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.m6.launch_variants", module]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == import_module(module).ENGINES.keys()
    for name, engine in found.items():
        assert engine["at start"] >= 9 and engine["steps"] >= steps, name
        assert not engine["not in the dry run"], f"{name}, compiled one after the other: {engine['not in the dry run']}"
        assert not engine["later"], f"{name}: {engine['later']}"


def watch_compiling(monkeypatch: pytest.MonkeyPatch) -> list[str]:
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
    return compiled


def assert_nothing_is_compiled_after_the_start(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = watch_compiling(monkeypatch)
    engine = make_engine(EngineConfig(**{**FIELDS, "dtype": "bfloat16"} | fields))
    assert len(compiled) >= 9, f"the hook saw {compiled}"
    compiled.clear()
    assert serve_everything(engine) >= 100
    engine.close()
    assert not compiled
