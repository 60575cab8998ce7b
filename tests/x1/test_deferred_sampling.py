"""A draw that waits for its masks, on a GPU: each step draws with its own masks and no other's. (On a CPU: `test_structured.py`.)"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.sampling_params import SamplingParams
from folovllm.worker.step_graph import SLOTS, CudaGraph, HostRing
from tests.helpers import prompts, tiny_checkpoint
from tests.m6.test_overlap import MODES, assert_clean, essence
from tests.m6.test_sampling_rows import forbid_waits
from tests.workloads import Request, serve

needs_llguidance = pytest.mark.skipif(find_spec("llguidance") is None, reason="needs llguidance")


def engine(**overrides: Any) -> LLMEngine:
    fields = {"milestone": "m6", "max_model_len": 200, "max_num_seqs": 40, "device": "cuda", "dtype": "float32"}
    fields |= {"model": str(tiny_checkpoint()), "attention_backend": "triton", "use_tqdm": False, "num_kv_blocks": 600}
    return make_engine(EngineConfig(**(fields | overrides)))


def choices() -> list[Request]:
    """Texts of a real form, some with all else that a request may ask for; free ones between them."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcd", k=rng.randrange(4, 30))) for _ in range(40)]
    kinds: list[dict[str, Any]] = [
        {"structured_outputs": {"choice": texts}},
        {},
        {"structured_outputs": {"choice": texts}, "presence_penalty": 0.8, "repetition_penalty": 1.3, "logprobs": 2},
        {"top_p": 0.8, "frequency_penalty": 1.0},
        {"structured_outputs": {"choice": texts}, "top_k": 2, "min_tokens": 12},
        {"logit_bias": {70: 4.0}, "bad_words": ["a", "bc"], "logprobs": 0},
        {"structured_outputs": {"choice": texts}, "logit_bias": {64: 9.0}, "n": 3},
    ]
    return [
        Request(prompt, SamplingParams(seed=i, max_tokens=40, **kinds[i % len(kinds)]))
        for i, prompt in enumerate(prompts([1 + 3 * i for i in range(21)], seed=8))
    ]


def grammars() -> list[Request]:
    """What llguidance holds answers to, and free ones between them."""
    from tests.x1.test_structured import INPUTS, MIXED

    return [Request(prompt, params) for prompt, params in zip(INPUTS, MIXED, strict=True)]


FORMS = [pytest.param(choices, id="choice"), pytest.param(grammars, id="llguidance", marks=needs_llguidance)]


@pytest.mark.gpu
class TestOnAGPU:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("asked", FORMS)
    def test_answers_are_those_of_m5(self, asked: Any, mode: str) -> None:
        """Which draws with torch, a step at a time, on the same card: forms, seeds, penalties, and who is beside."""
        requests = asked()
        expected = serve(engine(milestone="m5"), requests)
        served = engine(**MODES[mode])
        for request, mine, other in zip(requests, serve(served, requests, "random_steps"), expected, strict=True):
            assert essence(mine) == essence(other), request.params
            form = request.params.structured_outputs
            if form is not None and form.choice is not None:
                texts = {answer.text for answer in mine.outputs if answer.finish_reason == "stop"}
                assert texts and texts <= {*form.choice}
        assert_clean(served)

    def test_nothing_is_captured_and_nothing_waits_while_it_serves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A late step costs others no stall: all its graphs are there, and the host never waits for the device in it."""
        served = engine()
        monkeypatch.setattr(CudaGraph, "capture", None)
        forbid_waits(monkeypatch, served.executor._worker.runner, "execute_model")
        serve(served, choices())

    def test_two_engines_at_once(self) -> None:
        """Each in a thread of its own, on one card."""
        engines = [engine() for _ in range(2)]
        expected = [essence(output) for output in serve(engine(), choices())]
        with ThreadPoolExecutor(2) as pool:
            for outputs in pool.map(lambda served: serve(served, choices()), engines):
                assert [essence(output) for output in outputs] == expected

    def test_no_buffer_is_used_again_too_early(self) -> None:
        """The device is far behind: what was put aside for it is still there when it comes to it."""
        device = torch.device("cuda")
        ring = HostRing(torch.int32, device)
        torch.cuda._sleep(1_000_000)
        sizes = [1 + 977 * i % 5000 for i in range(5 * SLOTS)]
        copies = []
        for i, size in enumerate(sizes):
            torch.cuda._sleep(200_000)
            copies.append(ring.to_device(np.full(size, i, np.int32)))
        for i, (size, copy) in enumerate(zip(sizes, copies, strict=True)):
            assert copy.tolist() == [i] * size
