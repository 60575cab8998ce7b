"""Workloads as data: what is asked, how long the answers are, and when the requests come."""

from __future__ import annotations

import json
import math
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WORKLOADS = ("default", "latency", "mixed", "nano-vllm")


@dataclass(slots=True, frozen=True)
class BenchRequest:
    """A prompt and the exact number of tokens to generate for it."""

    prompt: list[int]
    output_len: int
    arrival: float = 0.0  # seconds after the start of the run


@dataclass(slots=True, frozen=True)
class Workload:
    """Requests in order of arrival. Ends of text are ignored: every run generates the same number of tokens."""

    name: str
    requests: list[BenchRequest]
    temperature: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(request.output_len for request in self.requests)

    @property
    def longest(self) -> int:
        """The context that the longest request needs."""
        return max(len(request.prompt) + request.output_len for request in self.requests)

    def for_vocabulary(self, size: int) -> Workload:
        """Return the same for a model with `size` tokens: larger ids wrap around."""
        requests = [replace(request, prompt=[token % size for token in request.prompt]) for request in self.requests]
        return replace(self, requests=requests)

    def describe(self) -> dict[str, Any]:
        """Return what a result file says about the workload."""
        return {
            "name": self.name,
            "requests": len(self.requests),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "temperature": self.temperature,
        }


def load_workload(name: str, vocab_size: int, count: int | None = None) -> Workload:
    """Load a built-in workload or a file of JSON lines; `count` keeps only its first requests.

    A line holds `prompt_token_ids` or `prompt_len`, and `output_len`; `arrival` in seconds may follow. Ids beyond the
    vocabulary wrap around, so that one workload fits every model.

    Raises:
        ValueError: no such workload, or a line that is none; the sentence names the line.
    """
    if name == "default":
        workload = Workload(name, _uniform(random.Random(0), 64 if count is None else count))
    elif name == "latency":
        workload = Workload(name, [BenchRequest(_ids(random.Random(0), 128), 256)])
    elif name == "mixed":
        workload = Workload(name, _mixed(random.Random(0), 24 if count is None else count))
    elif name == "nano-vllm":
        workload = Workload(name, _nano_vllm(), temperature=0.6)
    elif os.path.isfile(name):
        workload = Workload(Path(name).name, _from_file(Path(name)))
    else:
        raise ValueError(
            f"unknown workload {name!r}: choose one of {', '.join(WORKLOADS)}, or name a file of JSON lines"
        )
    return replace(workload, requests=workload.requests[:count]).for_vocabulary(vocab_size)


def mixed_workload(count: int, seed: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Workload:
    """Draw many short lengths and few long ones: their logarithm is uniform between the bounds."""
    rng, ids = random.Random(seed), random.Random(0)

    def length(bounds: tuple[int, int]) -> int:
        return round(math.exp(rng.uniform(math.log(bounds[0]), math.log(bounds[1]))))

    return Workload("mixed", [BenchRequest(_ids(ids, length(prompts)), length(answers)) for _ in range(count)])


def _uniform(rng: random.Random, count: int) -> list[BenchRequest]:
    """Prompts of 32 to 256 tokens, answers of 32 to 128."""
    return [BenchRequest(_ids(rng, rng.randint(32, 256)), rng.randint(32, 128)) for _ in range(count)]


def _mixed(rng: random.Random, count: int) -> list[BenchRequest]:
    """A little of all that M2 to M5 are for.

    Prompts of 264 to 288 tokens that share the first 256, answers of 48 to 112 tokens. The ninth request, and each
    twelfth after it, has a prompt of 1,000 tokens of its own, which comes while others are being answered.
    """
    shared = _ids(rng, 256)
    requests = []
    for index in range(count):
        prompt = _ids(rng, 1000) if index % 12 == 8 else shared + _ids(rng, rng.randint(8, 32))
        requests.append(BenchRequest(prompt, rng.randint(48, 112)))
    return requests


def _nano_vllm() -> list[BenchRequest]:
    """nano-vllm's own benchmark: 256 requests; all prompts are drawn before the first length of an answer."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    return [BenchRequest(prompt, rng.randint(100, 1024)) for prompt in prompts]


def _from_file(path: Path) -> list[BenchRequest]:
    rng, requests = random.Random(0), []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt = record.get("prompt_token_ids") or _ids(rng, int(record["prompt_len"]))
            requests.append(BenchRequest(prompt, int(record["output_len"]), float(record.get("arrival", 0))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is no request: it needs prompt_len (or prompt_token_ids) and output_len"
            ) from error
        if not prompt or requests[-1].output_len < 1:
            raise ValueError(f"{path}, line {number}: prompt and answer need at least one token each")
    if not requests:
        raise ValueError(f"{path} holds no request")
    return sorted(requests, key=lambda request: request.arrival)


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, 10_000) for _ in range(count)]
