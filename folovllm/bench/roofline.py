"""The least time that a workload can take on a device, from what is measured on that device in the same run.

Decode is bound by memory: each step reads all weights, and each token the K/V of its context. Prefill is bound by
arithmetic. The bound supposes that all requests run at once, so that there are as few steps as the longest answer has
tokens; no schedule can beat it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from folovllm.bench.workload import Workload
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
    layer, head = _matrix_parameters(setup)
    a, requests = setup.attention, workload.requests
    weight_bytes = (layer + head) * setup.dtype.itemsize
    steps = max(request.output_len for request in requests) - 1  # the first token comes from the prefill
    kv_tokens = sum(
        (request.output_len - 1) * len(request.prompt) + request.output_len * (request.output_len - 1) // 2
        for request in requests
    )
    decode = weight_bytes * steps + kv_tokens * setup.kv_bytes_per_token
    causal = sum(2 * len(request.prompt) ** 2 for request in requests) * a.num_heads * a.head_dim * setup.num_layers
    return decode / rates.copy + (2 * layer * workload.prompt_tokens + causal) / rates.matmul


def _matrix_parameters(setup: EngineSetup) -> tuple[int, int]:
    """Weights of all layers' matrices, and of the head (the embedding's rows that are looked up cost nothing)."""
    a, config = setup.attention, setup.hf_config
    hidden = config.hidden_size
    attention = hidden * a.head_dim * (2 * a.num_heads + 2 * a.num_kv_heads)
    return setup.num_layers * (attention + 3 * hidden * config.intermediate_size), setup.vocab_size * hidden
