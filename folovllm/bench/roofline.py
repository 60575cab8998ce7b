"""The least time that a workload can take on a device, from what is measured on that device in the same run.

Decode is bound by memory: each step reads all weights, and each token the K/V of its context. Prefill is bound by
arithmetic. The bound supposes that all requests run at once, so that there are as few steps as the longest answer has
tokens; no schedule can beat it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from folovllm.bench.workload import Workload
from folovllm.model_config import num_experts_of, windows_of
from folovllm.models.registry import renamed_by
from folovllm.models.shapes import Shapes, expert_shapes, linear_bytes, linear_shapes
from folovllm.setup import EngineSetup


@dataclass(slots=True, frozen=True)
class Rates:
    """What the device reaches: bytes a second (read plus written) of a copy, and FLOP/s of a matrix product."""

    copy: float
    matmul: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """Median rates of a large copy and a large square product in `dtype`."""
    numel, n = (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 1024)
    return Rates(_copy_rate(numel, device, dtype), _matmul_rate(n, device, dtype))


def _copy_rate(numel: int, device: torch.device, dtype: torch.dtype) -> float:
    source = torch.ones(numel, dtype=dtype, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)


def _matmul_rate(n: int, device: torch.device, dtype: torch.dtype) -> float:
    matrix = torch.randn(n, n, device=device).to(dtype)
    return 2 * n**3 / _seconds(lambda: matrix @ matrix, device)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Median time of `work`, after one run that does not count."""
    times = []
    for _ in range(repeats + 1):
        _wait_for(device)
        start = time.perf_counter()
        work()
        _wait_for(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def roofline_seconds(workload: Workload, setup: EngineSetup, rates: Rates) -> float:
    """Return the seconds that the workload takes at least."""
    sizes = MatrixSizes.of(setup)
    a, requests = setup.attention, workload.requests
    steps = max(request.output_len for request in requests) - 1  # the first token comes from the prefill
    decodes = [sum(request.output_len > step + 1 for request in requests) for step in range(steps)]
    weights = steps * (weight_bytes(setup, linear_shapes(setup.hf_config)) + sizes.head * setup.dtype.itemsize)
    expert = weight_bytes(setup, expert_shapes(setup.hf_config))
    read = weights + expert * sum(experts_read(sizes, decoding) for decoding in decodes)
    kv_tokens = pairs = 0  # read by decodes, and products of prompts' queries and keys, over all layers
    for window, layers in Counter(windows_of(setup.hf_config)).items():
        kv_tokens += layers * sum(tokens_read(len(r.prompt), r.output_len, window) for r in requests)
        pairs += layers * sum(
            len(r.prompt) ** 2 - max(0, len(r.prompt) - (window or len(r.prompt))) ** 2 for r in requests
        )
    decode = read + kv_tokens * (setup.kv_bytes_per_token // setup.num_layers)
    causal = 2 * pairs * a.num_heads * a.head_dim
    products = 2 * setup.num_layers * (sizes.always + sizes.asked * sizes.expert) * workload.prompt_tokens
    return decode / rates.copy + (products + causal) / rates.matmul


def weight_bytes(setup: EngineSetup, shapes: Shapes) -> int:
    """Bytes of such matrices in all layers, as they are kept: of codes, with their scales."""
    return linear_bytes(setup.hf_config, setup.dtype, shapes, renamed_by(setup.hf_config))


def tokens_read(prompt_len: int, output_len: int, window: int | None) -> int:
    """Return how many tokens' K/V the decodes of one answer read in one layer; the answer's first token is no decode."""
    return sum(min(n, window or n) for n in range(prompt_len + 1, prompt_len + output_len))


@dataclass(frozen=True, slots=True)
class MatrixSizes:
    """Numbers of weights in matrices; the embedding's rows that are looked up cost nothing.

    Attributes:
        always: of a layer, that each token is multiplied by. expert: of one expert in a layer, 0 without experts.
        head: of the head. num_experts, asked: experts in a layer, and how many of them a token asks.
    """

    always: int
    expert: int
    head: int
    num_experts: int
    asked: int

    @classmethod
    def of(cls, setup: EngineSetup) -> MatrixSizes:
        """Those of the whole model."""
        config = setup.hf_config
        always, expert = (
            sum(outputs * inputs for outputs, inputs in shapes.values())
            for shapes in (linear_shapes(config), expert_shapes(config))
        )
        head, num_experts = setup.vocab_size * config.hidden_size, num_experts_of(config)
        return cls(always, expert, head, num_experts, config.num_experts_per_tok if num_experts else 0)


def experts_read(sizes: MatrixSizes, num_tokens: int) -> float:
    """How many experts of a layer a step of that many tokens reads, on average, if each expert is as likely as another.

    One token reads k of E; n tokens miss an expert with probability (1 - k / E)^n.
    """
    if not sizes.num_experts:
        return 0.0
    return sizes.num_experts * (1 - (1 - sizes.asked / sizes.num_experts) ** num_tokens)
