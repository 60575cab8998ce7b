"""Two ranks give what one gives: real processes, gloo between them, every feature that looks at a token.

Also what crosses between processes, and where a child process looks for modules.
"""

import os
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import folovllm
from folovllm.distributed.children import import_path
from folovllm.engine.llm_engine import LLMEngine
from folovllm.executor.messages import decode_result, decode_step, encode_result, encode_step
from folovllm.executor.multiproc_executor import Rank
from folovllm.executor.rank import Answer, Failure
from folovllm.sample.sampling_row import pack_rows
from folovllm.step.packed import Field, PackedStep, Sample
from folovllm.step.schedule import SamplingSpec, StepResult
from tests.helpers import tiny_checkpoint
from tests.m6 import test_prompt_logprobs, test_sampling_rows
from tests.m6.test_overlap import assert_clean
from tests.workloads import ARRIVALS, make_engine, serve, workload

SMALL = {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 20}  # preemption, and prompts in chunks
ENGINES: dict[str, dict[str, Any]] = {
    "qwen3, small pool": SMALL,
    "llama, eager and not overlapped": {"family": "llama", "enforce_eager": True, "async_scheduling": False},
}
FIRST, *OTHERS = ENGINES


def engine(family: str = "qwen3", **overrides: Any) -> LLMEngine:
    return make_engine(tiny_checkpoint(family), **{"milestone": "m6", "max_num_seqs": 24} | overrides)


@pytest.fixture(scope="module", params=[FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(name: str, forked_commands: str) -> Iterator[LLMEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forked_commands)
        two = engine(tensor_parallel_size=2, **ENGINES[name])
    yield two
    two.close()


def family_of(name: str) -> str:
    return ENGINES[name].get("family", "qwen3")


class TestTwoRanks:
    def test_every_kind_of_request(self, served: LLMEngine, name: str) -> None:
        """Penalties, filters, stop strings, n, log-probabilities: tokens and texts are M1's, beside some that are aborted, too."""
        test_sampling_rows.check(serve(served, test_sampling_rows.requests(), ARRIVALS[2]), family_of(name))
        before = served.prefix_cache_stats().tokens_hit
        test_sampling_rows.check(test_sampling_rows.serve_and_abort(served), family_of(name))
        assert served.prefix_cache_stats().tokens_hit > before
        assert_clean(served)
        if "num_kv_blocks" in ENGINES[name]:
            assert served.stats().preemptions > 0

    def test_prompts_are_scored(self, served: LLMEngine, name: str) -> None:
        """As transformers does. Each prompt comes twice, so that the second finds it in the cache."""
        requests = test_prompt_logprobs.requests()
        for request, output in zip(requests, serve(served, requests), strict=True):
            test_prompt_logprobs.check(output, request.prompt, request.params.prompt_logprobs, family_of(name))


@given(rows=st.lists(st.lists(st.integers(0, 258), max_size=4), max_size=3), logprobs=st.lists(st.integers(0, 9)))
def test_a_step_crosses(rows: list[list[int]], logprobs: list[int]) -> None:
    specs = [SamplingSpec(seed=2**62 + i, top_p=0.5, forbidden=tuple(ends)) for i, ends in enumerate(rows)]
    fields = np.arange(len(Field) * 3, dtype=np.int32).reshape(len(Field), 3)
    step = PackedStep(
        fields, 3, 1, np.arange(5, dtype=np.int32), np.ones((3, 2), np.int32),
        np.arange(len(Sample) * 4, dtype=np.int32).reshape(len(Sample), 4),
        pack_rows({7 - i: spec for i, spec in enumerate(specs)}),
        logprobs=np.array([range(len(logprobs)), logprobs], np.int32), is_special=bool(rows), defers_sampling=True,
    )  # fmt: skip
    back = decode_step(encode_step(step))
    assert isinstance(back, PackedStep)
    assert (back.num_seqs, back.num_decodes, back.is_special) == (3, 1, bool(rows))
    assert (back.has_memory, back.defers_sampling) == (False, True)
    ours, theirs = step.sampling_updates, back.sampling_updates
    assert (ours.num_rows, ours.num_with_line) == (theirs.num_rows, theirs.num_with_line)
    for mine, other in zip(step.parts, back.parts, strict=True):
        assert np.array_equal(mine, other) and mine.shape == other.shape


@pytest.mark.parametrize("logprobs", [{}, {1: [[(3, -0.5, 1)], [(4, -2.25, 7), (9, -0.125, 1)]]}])
def test_a_result_crosses(logprobs: dict[int, list[list[tuple[int, float, int]]]]) -> None:
    result = StepResult([[5], [6, 300], []], logprobs)
    assert decode_result(encode_result(result)) == result


def test_readiness_is_remembered_until_it_is_asked_for() -> None:
    """`check` listens to all ranks while one of them is waited for."""
    ours, theirs = Pipe()
    rank = Rank(cast(Any, SimpleNamespace(poll=lambda: None)), ours)
    rank.receive()
    assert rank.answer is None
    ready = Answer((7, [1, 2]))
    theirs.send(ready)
    for _ in range(2):
        rank.receive()
        assert rank.answer == ready and not rank.is_dead
    theirs.send(Failure("OSError: gone", "", False, False))
    rank.receive()
    assert rank.is_dead


OWN = str(Path(folovllm.__file__).parents[1])


@pytest.mark.parametrize(("here", "expected"), [
    (["/a", OWN, "/b"], ["/a", OWN, "/b"]),
    (["", "/a", OWN], ["/a", OWN]),  # an interactive Python, this package installed
    (["", "/a"], [OWN, "/a"]),  # found in the working directory
    (["/a", "/a"], ["/a", OWN]),  # found by a finder of its own
    ([Path("/b"), "/a", OWN], ["/a", OWN]),  # Python passes over what is no text
])  # fmt: skip
def test_the_paths_of_this_process(here: list[Any], expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", here)
    assert import_path().split(os.pathsep) == expected


@pytest.mark.multi_gpu
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_on_gpus(kind: str, size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    load = workload(kind)
    served = engine(device="cuda", dtype="float32", attention_backend="triton", tensor_parallel_size=size)
    load.check(serve(served, load.requests), tol=0.05)
    assert_clean(served)
    served.close()
