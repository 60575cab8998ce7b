"""Requests of mixed lengths, three ways to submit them, and the answers that every engine must give.

The reference is M1: one request at a time through transformers' model. `Workload.check(outputs)` compares with it in the
sense of `tests.helpers`: tokens are equal up to the first step whose choice was a close call.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.scheduler import Scheduler
from folovllm.outputs import RequestOutput
from folovllm.sample.noise import gumbel
from folovllm.sample.sampler import Sampler, SamplingBatch
from folovllm.sampling_params import SamplingParams
from tests.helpers import assert_tokens_equal, assert_varied, hf_logits, prompts, tiny_checkpoint, tolerance

ARRIVALS = ("at_once", "one_by_one", "random_steps")
KINDS = ("greedy", "seeded")
MAX_MODEL_LEN = 128
MAX_STEPS = 5000  # far beyond any workload here: an engine that needs more is stuck


@dataclass(frozen=True)
class Request:
    """What one user asks for; `priority` matters to engines with scheduling="priority"."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0


@dataclass(frozen=True)
class Workload:
    """Requests, M1's answers to them, and the scores [n, V] whose argmax each token of an answer was."""

    model: Path
    requests: list[Request]
    answers: list[list[int]]
    scores: list[torch.Tensor]

    def check(self, outputs: Sequence[RequestOutput], tol: float | None = None) -> None:
        """One finished output a request, in their order, with M1's tokens."""
        assert len(outputs) == len(self.requests)
        for output, answer, scores in zip(outputs, self.answers, self.scores, strict=True):
            assert output.finished
            assert_tokens_equal(output.outputs[0].token_ids, answer, scores, _tolerance(scores) if tol is None else tol)


def mixed_requests(kind: str = "greedy", count: int = 32, seed: int = 0) -> list[Request]:
    """Prompts of 1 to 60 tokens and answers of 1 to 24; every fifth stops early at one of many stop tokens."""
    assert kind in KINDS
    rng = random.Random(seed)
    lengths = [1, 2, 60, *(rng.choice((rng.randint(1, 8), rng.randint(9, 60))) for _ in range(count - 3))][:count]
    drawn = SamplingParams(temperature=0.0 if kind == "greedy" else 0.8)
    requests = []
    for i, prompt in enumerate(prompts(lengths, seed)):
        params = replace(drawn, max_tokens=rng.choice((1, 2, 5, 9, 16, 24)), ignore_eos=True)
        if i % 5 == 4:
            params = replace(params, stop_token_ids=list(range(i, 256, 11)))
        if kind == "seeded":
            params = replace(params, seed=1000 + i, top_k=(-1, 20)[i % 2], min_p=(0.0, 0.02)[i % 3 == 2])
        requests.append(Request(prompt, params, priority=rng.randint(0, 3)))
    return requests


@lru_cache(maxsize=8)
def workload(kind: str = "greedy", count: int = 32, seed: int = 0, family: str = "qwen3") -> Workload:
    """The requests with M1's answers, computed once a process."""
    return answered(tiny_checkpoint(family), mixed_requests(kind, count, seed))


def answered(model: Path, requests: list[Request]) -> Workload:
    """Any requests with M1's answers."""
    outputs = serve(make_engine(model, milestone="m1"), requests)
    answers = [output.outputs[0].token_ids for output in outputs]
    assert_varied([answer for answer in answers if len(answer) >= 9])
    scores = [_scores(model, *pair) for pair in zip(requests, answers, strict=True)]
    for answer, own in zip(answers, scores, strict=True):
        assert_tokens_equal(own.argmax(-1).tolist(), answer, own, _tolerance(own))
    return Workload(model, requests, answers, scores)


def _tolerance(scores: torch.Tensor) -> float:
    """As for logits; what a filter removed (-inf) does not count."""
    return tolerance(scores.masked_fill(scores.isinf(), 0.0))


def _scores(model: Path, request: Request, answer: list[int]) -> torch.Tensor:
    """What the argmax was taken of at each step: [n, V]; filters as in the sampler, computed from whole sequences."""
    params, first = request.params, len(request.prompt)
    logits = hf_logits(model, [*request.prompt, *answer[:-1]])[first - 1 :].float()  # [n, V]
    if params.temperature == 0:
        return logits
    rows, positions = len(answer), torch.arange(first, first + len(answer))
    batch = SamplingBatch(
        temperature=torch.full((rows,), params.temperature), seeds=torch.full((rows,), params.seed), positions=positions,
        all_greedy=False, min_p=torch.full((rows,), params.min_p) if params.min_p else None,
        top_k=torch.full((rows,), params.top_k) if params.top_k > 0 else None, top_p=None,
    )  # fmt: skip
    return Sampler().filter(logits, batch) + gumbel(batch.seeds, positions, logits.shape[-1])


def make_engine(model: Path, **overrides: Any) -> LLMEngine:
    """An engine over a tiny model, with a context that holds every request here."""
    overrides = {"milestone": "m2", "max_model_len": MAX_MODEL_LEN, "device": "cpu", "use_tqdm": False} | overrides
    return LLMEngine(EngineConfig(model=str(model), **overrides))


def arrival_steps(arrival: str, count: int, seed: int = 0) -> list[int | None]:
    """At which step each request is submitted; None: when the one before has finished."""
    if arrival == "one_by_one":
        return [None] * count
    rng = random.Random(seed)
    return [0] * count if arrival == "at_once" else sorted(rng.randint(0, 2 * count) for _ in range(count))


def serve(engine: LLMEngine, load: Sequence[Request], arrival: str = "at_once", seed: int = 0) -> list[RequestOutput]:
    """Submit the requests as `arrival` says and step until all are finished; outputs in the order of requests."""
    steps = arrival_steps(arrival, len(load), seed)
    finished: dict[str, RequestOutput] = {}
    sent = 0
    for step in range(MAX_STEPS):
        while sent < len(load) and (len(finished) == sent if (at := steps[sent]) is None else at <= step):
            request = load[sent]
            engine.add_request(f"r{sent}", request.prompt, request.params, priority=request.priority, stream=False)
            sent += 1
        if engine.has_unfinished_requests():
            for output in engine.step():
                assert output.request_id not in finished, f"{output.request_id} ended twice"
                finished[output.request_id] = output
        elif sent == len(load):
            assert_nothing_left(engine)
            return [finished[f"r{i}"] for i in range(len(load))]
    raise AssertionError(f"{len(load) - len(finished)} of {len(load)} requests unfinished after {MAX_STEPS} steps")


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last word on each request."""
    return {output.request_id: output for output in run_to_end(engine)}


def run_to_end(engine: LLMEngine) -> list[RequestOutput]:
    """All that the engine says until nothing is left to do."""
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


AT_ONCE, ONE_BY_ONE, RANDOM_STEPS = RUNS = ("seeded", "at_once"), ("greedy", "one_by_one"), ("greedy", "random_steps")


def check_runs(engine: LLMEngine, *runs: tuple[str, str]) -> None:
    """It serves such requests, submitted so, one run after another, with M1's answers. If none is named, all runs."""
    for seed, (kind, arrival) in enumerate(runs or RUNS):
        expected = workload(kind, 16)
        expected.check(serve(engine, expected.requests, arrival, seed))


def assert_nothing_left(engine: LLMEngine) -> None:
    """No request, no queue and no cache is held."""
    stats = engine.stats()
    assert not engine.has_unfinished_requests()
    assert (stats.waiting, stats.running, stats.kv_tokens_stored) == (0, 0, 0)
    if isinstance(engine.scheduler, Scheduler):
        assert engine.scheduler.kv.num_free == engine.scheduler.kv.num_blocks
    assert (stats.kv_blocks_used, stats.kv_bytes_reserved, stats.kv_bytes_used) == (0, 0, 0)
