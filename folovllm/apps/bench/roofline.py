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
from typing import TYPE_CHECKING, Any

import torch

from folovllm.apps.bench.workload import Workload
from folovllm.engine.setup import EngineSetup
from folovllm.layers.fusable import fusable
from folovllm.layers.linear import LinearBase
from folovllm.models.model_config import num_experts_of, num_linear_of, windows_of
from folovllm.models.registry import build_model

if TYPE_CHECKING:
    from folovllm.models.llama import LlamaForCausalLM


@dataclass(slots=True, frozen=True)
class Rates:
    """What the device reaches: bytes a second (read plus written) of a copy, and FLOP/s of a matrix product."""

    copy: float
    matmul: float


def measure_rates(device: torch.device, dtype: torch.dtype, numel: int = 0, n: int = 0) -> Rates:
    """Median rates of a copy of `numel` values and a product of `n` x `n` matrices in `dtype`; large ones if nothing is said."""
    numel, n = (numel, n) if n else (1 << 30, 8192) if device.type == "cuda" else (1 << 26, 1024)
    source = torch.ones(numel, dtype=dtype, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)
    matrix = torch.randn(n, n, device=device).to(dtype)
    return Rates(copy, 2 * n**3 / _seconds(lambda: matrix @ matrix, device))


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """Median time of `work`, after one run that does not count."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda device: None
    times = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the matrices in all decoder layers: how many, and their bytes, of quantized ones with their scales.

    Attributes:
        always, always_bytes: those that each token is multiplied by.
        experts, expert_bytes: those of experts; 0 in a model without.
    """

    always: int
    always_bytes: int
    experts: int
    expert_bytes: int

    @classmethod
    def of(cls, model: LlamaForCausalLM, dtype: torch.dtype) -> Weights:
        """Those of a model, which needs no tensors."""
        linears = [(name, m) for name, m in model.model.layers.named_modules() if isinstance(m, LinearBase)]
        counts, sizes = Counter[bool](), Counter[bool]()
        for name, linear in linears:
            is_expert, outputs = "experts" in name.split("."), sum(linear.output_sizes)
            counts[is_expert] += outputs * linear.input_size
            sizes[is_expert] += fusable(linear.linear_method).num_bytes(outputs, linear.input_size, dtype)
        return cls(counts[False], sizes[False], counts[True], sizes[True])


def roofline_seconds(workload: Workload, setup: EngineSetup, rates: Rates) -> float:
    """Return the seconds that the workload takes at least."""
    config, requests = setup.hf_config, workload.requests
    model = build_model(config, setup.dtype, "meta", max_model_len=1)
    weights = Weights.of(model, setup.dtype)
    num_experts, asked = (num_experts_of(config), config.num_experts_per_tok) if num_experts_of(config) else (1, 0)
    steps = max(request.output_len for request in requests) - 1  # the first token comes from the prefill
    decodes = [sum(request.output_len > step + 1 for request in requests) for step in range(steps)]
    head = setup.vocab_size * config.hidden_size * setup.dtype.itemsize  # rows that are looked up cost nothing
    read = steps * (weights.always_bytes + head)
    read += weights.expert_bytes / num_experts * sum(experts_read(num_experts, asked, n) for n in decodes)
    kv_tokens = pairs = 0  # read by decodes, and products of prompts' queries and keys, over all layers with K/V
    windows, num_linear = Counter(windows_of(config)), num_linear_of(config)
    windows[None] -= num_linear
    for window, layers in windows.items():
        kv_tokens += layers * sum(tokens_read(len(r.prompt), r.output_len, window) for r in requests)
        pairs += layers * sum(
            len(r.prompt) ** 2 - max(0, len(r.prompt) - (window or len(r.prompt))) ** 2 for r in requests
        )
    keepers: list[Any] = [module for module in model.modules() if hasattr(module, "state_bytes")]
    states = 2 * sum(decodes) * sum(layer.state_bytes for layer in keepers)  # read and written
    decode = read + kv_tokens * (setup.kv_bytes_per_token // max(1, config.num_hidden_layers - num_linear)) + states
    causal = 2 * pairs * setup.attention.num_heads * setup.attention.head_dim
    products = 2 * (weights.always + weights.experts * asked / num_experts) * workload.prompt_tokens
    updates = sum(layer.state_flops for layer in keepers) * workload.prompt_tokens
    return decode / rates.copy + (products + causal + updates) / rates.matmul


def tokens_read(prompt_len: int, output_len: int, window: int | None) -> int:
    """Return how many tokens' K/V the decodes of one answer read in one layer; the answer's first token is no decode."""
    return sum(min(n, window or n) for n in range(prompt_len + 1, prompt_len + output_len))


def experts_read(num_experts: int, asked: int, num_tokens: int) -> float:
    """How many experts of a layer a step of that many tokens reads, on average, if each expert is as likely as another.

    One token reads k of E; n tokens miss an expert with probability (1 - k / E)^n.
    """
    return num_experts * (1 - (1 - asked / num_experts) ** num_tokens)
