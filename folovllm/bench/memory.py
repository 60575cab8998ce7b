"""Pages against slots: how many sequences the same memory serves, how fast, and how much of it holds no token.

    python -m folovllm.bench.memory --slots 8 --max-model-len 512

gives M2 eight slots of 512 tokens and M3 the same bytes in pages, and each the same requests, all there at the start:
many short ones and a few long ones.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from folovllm.config import PRESETS
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
        vocab_size, rng = llm.engine.setup.vocab_size, random.Random(0)
        llm.generate([1] * 8, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)  # warm up
        for i, request in enumerate(requests):
            params = SamplingParams(temperature=0, max_tokens=request.answer, ignore_eos=True)
            ids = [rng.randrange(vocab_size) for _ in range(request.prompt)]
            llm.engine.add_request(str(i), ids, params, stream=False)
        start, seen = time.monotonic(), []
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            seen.append(llm.engine.stats())
        return _summary(milestone, llm.engine.setup.block_size, requests, time.monotonic() - start, seen)


def _summary(
    milestone: str, block_size: int, requests: list[Request], seconds: float, seen: list[EngineStats]
) -> MemoryUse:
    busy = [stats for stats in seen if stats.running]
    return MemoryUse(
        milestone=milestone,
        block_size=block_size,
        kv_bytes=seen[0].kv_bytes_total,
        seconds=seconds,
        output_tokens=sum(request.answer for request in requests),
        steps=len(seen),
        preemptions=seen[-1].preemptions,
        mean_running=sum(stats.running for stats in busy) / len(busy),
        peak_running=max(stats.running for stats in busy),
        mean_waste=sum(stats.kv_waste for stats in busy) / len(busy),
        mean_stored=sum(stats.kv_bytes_used / stats.kv_bytes_total for stats in busy) / len(busy),
    )


def compare(milestones: list[str], requests: list[Request], **options: Any) -> Iterator[MemoryUse]:
    """One preset after the other, over the same requests and the same bytes."""
    for milestone in milestones:
        yield measure(milestone, requests, **options)


def as_table(results: list[MemoryUse]) -> Table:
    """A row a preset."""
    title = f"{results[0].kv_bytes / 2**20:.1f} MiB of KV cache, {results[0].output_tokens} tokens to generate"
    table = Table(title=title)
    columns = "preset", "page", "in flight", "peak", "tokens/s", "waste", "filled", "steps", "preempted"
    for name in columns:
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            r.milestone, str(r.block_size), f"{r.mean_running:.1f}", str(r.peak_running), f"{r.tokens_per_second:.0f}",
            f"{r.mean_waste:.1%}", f"{r.mean_stored:.1%}", str(r.steps), str(r.preemptions),
        )  # fmt: skip
    return table


def main(arguments: list[str] | None = None) -> None:
    """Measure and print; `--help` lists the flags."""
    parser = argparse.ArgumentParser(prog="python -m folovllm.bench.memory", description=__doc__)
    parser.add_argument("--milestones", default="m2,m3")
    parser.add_argument("--model")
    parser.add_argument("--random-weights", action="store_true", help="make weights up: --model needs no weights then")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(sys.argv[1:] if arguments is None else arguments)
    longest = given.max_model_len
    prompts, answers = (longest // 64 or 1, longest // 4), (longest // 32 or 1, longest // 2)
    requests = mixed_workload(given.requests, given.seed, prompts, answers)
    options = {"slots": given.slots, "max_model_len": longest, "block_size": given.block_size}
    if given.model:
        options["model"] = given.model
    if given.random_weights:
        options["random_weights"] = True
    Console().print(as_table(list(compare(given.milestones.split(","), requests, **options))))


if __name__ == "__main__":
    main()
