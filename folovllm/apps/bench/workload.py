"""Workloads as data: what is asked, and how long the answers are. Who asks says when: all at once, or by the load of `bench serve`."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec


@dataclass(slots=True, frozen=True)
class BenchRequest:
    """A prompt and the exact number of tokens to generate for it."""

    prompt: list[int]
    output_len: int


@dataclass(slots=True, frozen=True)
class Workload:
    """Requests in order. Ends of text are ignored: every run generates the same number of tokens."""

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

    def for_vocabulary(self, size: int, shift: int = 0) -> Workload:
        """Return the same for a model with `size` tokens: larger ids wrap around.

        Prompts that are shifted share among themselves what they did, and nothing with those of another shift.
        """
        prompts = ([(token + shift) % size for token in request.prompt] for request in self.requests)
        return replace(self, requests=list(map(BenchRequest, prompts, (each.output_len for each in self.requests))))

    def describe(self) -> dict[str, Any]:
        """Return what a result file says about the workload."""
        figures = {name: getattr(self, name) for name in ("prompt_tokens", "output_tokens", "temperature")}
        return {"name": self.name, "requests": len(self.requests)} | figures


def load_workload(name: str, count: int | None = None) -> Workload:
    """Load a built-in workload or a file of JSON lines; `count` keeps only its first requests.

    A line holds `prompt_token_ids` or `prompt_len`, and `output_len`.

    Raises:
        ValueError: no such workload, or a line that is none; the sentence names the line.
    """
    path, rng = Path(name), random.Random(0)
    if name in WORKLOADS:
        requests = WORKLOADS[name](rng, count)
    elif path.is_file():
        requests = _from_file(path, rng)
    else:
        raise ValueError(
            f"unknown workload {name!r}: choose one of {', '.join(WORKLOADS)}, or name a file of JSON lines"
        )
    return Workload(path.name, requests[:count], temperature=0.6 if name == "nano-vllm" else 0.0)


def mixed_workload(count: int, seed: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Workload:
    """Draw many short lengths and few long ones: their logarithm is uniform between the bounds."""
    rng, ids = random.Random(seed), random.Random(0)

    def length(bounds: tuple[int, int]) -> int:
        return round(math.exp(rng.uniform(*map(math.log, bounds))))

    return Workload("mixed", [BenchRequest(_ids(ids, length(prompts)), length(answers)) for _ in range(count)])


def _uniform(rng: random.Random, count: int | None) -> list[BenchRequest]:
    """64 prompts of 32 to 256 tokens, with answers of 32 to 128."""
    return [BenchRequest(_ids(rng, rng.randint(32, 256)), rng.randint(32, 128)) for _ in range(count or 64)]


def _latency(rng: random.Random, count: int | None) -> list[BenchRequest]:
    """One request: 128 tokens in, and 256 out."""
    return [BenchRequest(_ids(rng, 128), 256)]


def _mixed(rng: random.Random, count: int | None) -> list[BenchRequest]:
    """A little of all that M2 to M5 are for: 24 requests.

    Prompts of 264 to 288 tokens that share the first 256, answers of 48 to 112 tokens. The ninth request, and each
    twelfth after it, has a prompt of 1,000 tokens of its own, which comes while others are being answered.
    """
    shared = _ids(rng, 256)
    requests = []
    for index in range(count or 24):
        prompt = _ids(rng, 1000) if index % 12 == 8 else shared + _ids(rng, rng.randint(8, 32))
        requests.append(BenchRequest(prompt, rng.randint(48, 112)))
    return requests


def _nano_vllm(rng: random.Random, count: int | None) -> list[BenchRequest]:
    """nano-vllm's own benchmark: 256 requests; all prompts are drawn before the first length of an answer."""
    prompts = [_ids(rng, rng.randint(100, 1024)) for _ in range(256)]
    return [BenchRequest(prompt, rng.randint(100, 1024)) for prompt in prompts]


WORKLOADS = {"default": _uniform, "latency": _latency, "mixed": _mixed, "nano-vllm": _nano_vllm}


class Line(msgspec.Struct):
    """A request in a file: `prompt_len` random tokens, unless they are named."""

    output_len: Annotated[int, msgspec.Meta(ge=1)]
    prompt_len: int = 0
    prompt_token_ids: list[int] = []


def _from_file(path: Path, rng: random.Random) -> list[BenchRequest]:
    requests = []
    for number, text in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if text.strip():
            wrong = f"{path}, line {number} is no request: it needs prompt_len (or prompt_token_ids) and output_len, at least 1"
            try:
                line = msgspec.json.decode(text, type=Line)
            except ValueError as error:
                raise ValueError(wrong) from error
            requests.append(BenchRequest(line.prompt_token_ids or _ids(rng, line.prompt_len), line.output_len))
            if not requests[-1].prompt:
                raise ValueError(wrong)
    if not requests:
        raise ValueError(f"{path} holds no request")
    return requests


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(0, 10_000) for _ in range(count)]
