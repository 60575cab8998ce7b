"""The least time that a workload can take on a device, from what is measured on that device in the same run.

Decode is bound by memory: each step reads all weights, and each token the K/V of its context. Layers with a state read
it and write it for each token. Prefill is bound by arithmetic. The bound supposes that all requests run at once, so that there are as few steps as the longest answer has
tokens; no schedule can beat it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from folovllm.apps.bench.workload import Workload
from folovllm.engine.setup import EngineSetup
from folovllm.layers.fusable import fusable
from folovllm.layers.linear import LinearBase
from folovllm.models.model_config import num_experts_of, num_linear_of, windows_of
from folovllm.models.shapes import Shapes, linear_bytes, linear_shapes, token_mixers
from folovllm.plugins import EXPERTS, require


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


def expert_shapes(config: Any) -> Shapes:
    """Those of one expert; none in a model without."""
    return require(EXPERTS, "a model with experts").expert_shapes(config) if num_experts_of(config) else {}


def roofline_seconds(workload: Workload, setup: EngineSetup, rates: Rates) -> float:
    """Return the seconds that the workload takes at least."""
    config, sizes, requests = setup.hf_config, MatrixSizes.of(setup), workload.requests
    steps = max(request.output_len for request in requests) - 1  # the first token comes from the prefill
    decodes = [sum(request.output_len > step + 1 for request in requests) for step in range(steps)]
    weights = steps * (sizes.always_bytes + sizes.head * setup.dtype.itemsize)
    expert = weight_bytes(setup, expert_shapes(config))
    read = weights + expert * sum(experts_read(sizes, decoding) for decoding in decodes)
    kv_tokens = pairs = 0  # read by decodes, and products of prompts' queries and keys, over all layers with K/V
    windows, num_linear = Counter(windows_of(config)), num_linear_of(config)
    windows[None] -= num_linear
    for window, layers in windows.items():
        kv_tokens += layers * sum(tokens_read(len(r.prompt), r.output_len, window) for r in requests)
        pairs += layers * sum(
            len(r.prompt) ** 2 - max(0, len(r.prompt) - (window or len(r.prompt))) ** 2 for r in requests
        )
    keepers: list[Any] = [mixer for mixer in token_mixers(config, setup.dtype) if hasattr(mixer, "state_bytes")]
    states = 2 * sum(decodes) * sum(layer.state_bytes for layer in keepers)  # read and written
    decode = read + kv_tokens * (setup.kv_bytes_per_token // max(1, config.num_hidden_layers - num_linear)) + states
    causal = 2 * pairs * setup.attention.num_heads * setup.attention.head_dim
    products = 2 * (sizes.always + config.num_hidden_layers * sizes.asked * sizes.expert) * workload.prompt_tokens
    updates = sum(layer.state_flops for layer in keepers) * workload.prompt_tokens
    return decode / rates.copy + (products + causal + updates) / rates.matmul


def weight_bytes(setup: EngineSetup, shapes: Shapes) -> int:
    """Bytes of such matrices in all layers, as they are kept: of codes, with their scales."""
    return linear_bytes(setup.hf_config, setup.dtype, shapes)


def tokens_read(prompt_len: int, output_len: int, window: int | None) -> int:
    """Return how many tokens' K/V the decodes of one answer read in one layer; the answer's first token is no decode."""
    return sum(min(n, window or n) for n in range(prompt_len + 1, prompt_len + output_len))


@dataclass(frozen=True, slots=True)
class MatrixSizes:
    """Numbers of weights in matrices; the embedding's rows that are looked up cost nothing.

    Attributes:
        always, always_bytes: of all layers, that each token is multiplied by. expert: of one expert in a layer, 0 without experts.
        head: of the head. num_experts, asked: experts in a layer, and how many of them a token asks.
    """

    always: int
    always_bytes: int
    expert: int
    head: int
    num_experts: int
    asked: int

    @classmethod
    def of(cls, setup: EngineSetup) -> MatrixSizes:
        """Those of the whole model."""
        config = setup.hf_config
        mixers, shapes = token_mixers(config, setup.dtype), linear_shapes(config)
        if mixers:  # each layer has its own
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("self_attn.")}
        linears = [module for mixer in mixers for module in mixer.modules() if isinstance(module, LinearBase)]
        own = [(fusable(linear.linear_method), sum(linear.output_sizes), linear.input_size) for linear in linears]
        always = config.num_hidden_layers * sum(map(prod, shapes.values())) + sum(
            outputs * inputs for _, outputs, inputs in own
        )
        num_bytes = weight_bytes(setup, shapes) + sum(
            method.num_bytes(outputs, inputs, setup.dtype) for method, outputs, inputs in own
        )
        expert, num_experts = sum(map(prod, expert_shapes(config).values())), num_experts_of(config)
        asked = config.num_experts_per_tok if num_experts else 0
        return cls(always, num_bytes, expert, setup.vocab_size * config.hidden_size, num_experts, asked)


def experts_read(sizes: MatrixSizes, num_tokens: int) -> float:
    """How many experts of a layer a step of that many tokens reads, on average, if each expert is as likely as another.

    One token reads k of E; n tokens miss an expert with probability (1 - k / E)^n.
    """
    if not sizes.num_experts:
        return 0.0
    return sizes.num_experts * (1 - (1 - sizes.asked / sizes.num_experts) ** num_tokens)
