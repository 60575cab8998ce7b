"""`folovllm bench memory`: pages against slots in the same bytes.

M2 gets a number of slots, M3 the same memory in pages, and each the same requests, all there at the start: many short ones
and a few long ones. How many run at once, how fast, and how much of what they hold is empty?
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from folovllm.bench.contenders import Contender, used_settings
from folovllm.bench.report import Metric, Result, Run
from folovllm.config import PRESETS, EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.metrics import EngineStats
from folovllm.llm import LLM
from folovllm.sampling_params import SamplingParams


@dataclass(slots=True, frozen=True)
class Request:
    """Tokens of a prompt and of its answer."""

    prompt: int
    answer: int


@dataclass(slots=True, frozen=True)
class MemoryUse:
    """What one preset made of the memory. Means are over steps, and all steps count alike."""

    milestone: str
    block_size: int
    kv_bytes: int
    seconds: float
    cpu_seconds: float  # of this process: on a machine that others use too, the steadier of the two
    output_tokens: int
    steps: int
    preemptions: int
    mean_running: float
    peak_running: int
    mean_waste: float  # share of the reserved bytes that hold no token
    mean_stored: float  # share of all bytes of the cache that do

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prefill included."""
        return self.output_tokens / self.seconds

    def metrics(self) -> dict[str, Metric]:
        """The same for a report."""
        return {
            "sequences in flight, mean": Metric.of([self.mean_running]),
            "sequences in flight, most": Metric.of([self.peak_running]),
            "output tokens": Metric.of([self.tokens_per_second], "/s"),
            "output tokens a CPU second": Metric.of([self.output_tokens / self.cpu_seconds], "/s"),
            "reserved and empty": Metric.of([100 * self.mean_waste], "%", higher_is_better=False),
            "of the cache filled": Metric.of([100 * self.mean_stored], "%"),
            "steps": Metric.of([self.steps], higher_is_better=False),
            "preemptions": Metric.of([self.preemptions], higher_is_better=False),
        }


def bench_memory(
    contenders: list[Contender], slots: int = 8, max_model_len: int = 512, count: int = 96, seed: int = 0
) -> Result:
    """One preset after the other, over the same requests and the same bytes.

    Raises:
        ValueError: a preset whose cache is no pool, or a size of the pool beside `slots`.
    """
    for name, overrides in contenders:
        if PRESETS[overrides["milestone"]]["kv_cache"] == "growing":
            raise ValueError(f"{name} has no pool of KV cache to compare: take m2 or later")
        if overrides.get("num_kv_blocks"):
            raise ValueError("bench memory sizes the pool itself: give --slots in place of num_kv_blocks")
    prompts, answers = (max_model_len // 64 or 1, max_model_len // 4), (max_model_len // 32 or 1, max_model_len // 2)
    requests = mixed_workload(count, seed, prompts, answers)
    result = Result(
        "memory",
        {
            "name": f"mixed, in the memory of {slots} sequences of {max_model_len} tokens",
            "requests": count,
            "prompt_tokens": sum(request.prompt for request in requests),
            "output_tokens": sum(request.answer for request in requests),
            "seed": seed,
        },
    )
    for name, overrides in contenders:
        use = measure(requests=requests, slots=slots, **{**overrides, "max_model_len": max_model_len})
        result.runs.append(Run(name, used_settings(EngineConfig(**overrides)) | asdict(use), use.metrics()))
    return result


def mixed_workload(count: int, seed: int, prompts: tuple[int, int], answers: tuple[int, int]) -> list[Request]:
    """Lengths whose logarithm is uniform between the bounds: half of them lie below the geometric mean."""
    rng = random.Random(seed)

    def length(bounds: tuple[int, int]) -> int:
        return round(math.exp(rng.uniform(math.log(bounds[0]), math.log(bounds[1]))))

    return [Request(length(prompts), length(answers)) for _ in range(count)]


def measure(
    milestone: str, requests: list[Request], slots: int, max_model_len: int, block_size: int = 16, **overrides: Any
) -> MemoryUse:
    """Serve the requests in the memory of `slots` sequences of `max_model_len` tokens; loading does not count."""
    pages = {"num_kv_blocks": slots * max_model_len // block_size, "block_size": block_size}
    cache = {"num_kv_blocks": slots} if PRESETS[milestone]["kv_cache"] == "slots" else pages
    options: dict[str, Any] = {"max_num_seqs": 256, "use_tqdm": False, **cache, **overrides}
    with LLM(milestone=milestone, max_model_len=max_model_len, **options) as llm:
        llm.generate([1] * 8, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)  # warm up
        _submit(llm.engine, requests)
        seen = [llm.engine.stats()]
        start, cpu_start = time.monotonic(), time.process_time()
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            seen.append(llm.engine.stats())
        seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
        return _summary(milestone, llm.engine.setup.block_size, requests, seconds, cpu_seconds, seen)


def _submit(engine: LLMEngine, requests: list[Request]) -> None:
    """Prompts of random tokens, the same for every engine."""
    vocab_size, rng = engine.setup.vocab_size, random.Random(0)
    for i, request in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=request.answer, ignore_eos=True)
        engine.add_request(str(i), [rng.randrange(vocab_size) for _ in range(request.prompt)], params, stream=False)


def _summary(
    milestone: str,
    block_size: int,
    requests: list[Request],
    seconds: float,
    cpu_seconds: float,
    seen: list[EngineStats],
) -> MemoryUse:
    busy = [stats for stats in seen if stats.running]
    return MemoryUse(
        milestone=milestone,
        block_size=block_size,
        kv_bytes=seen[0].kv_bytes_total,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        output_tokens=sum(request.answer for request in requests),
        steps=seen[-1].steps - seen[0].steps,
        preemptions=seen[-1].preemptions,
        mean_running=sum(stats.running for stats in busy) / len(busy),
        peak_running=max(stats.running for stats in busy),
        mean_waste=sum(stats.kv_waste for stats in busy) / len(busy),
        mean_stored=sum(stats.kv_bytes_used / stats.kv_bytes_total for stats in busy) / len(busy),
    )
