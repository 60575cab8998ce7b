"""Decides what must be known before a weight is loaded: files, device, dtype, context, attention backend, threads."""

from __future__ import annotations

import logging
import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.registry import choose_backend, get_backend
from folovllm.config import EngineConfig
from folovllm.cores import num_cores
from folovllm.distributed.sharding import local_config
from folovllm.kv_format import FP8
from folovllm.model_config import head_dim_of, num_experts_of, num_kv_heads_of, num_linear_of, num_positions
from folovllm.models.registry import quantization_of
from folovllm.setup import EngineSetup

NAIVE = ("torch_naive", "native")  # the backend's name for what a growing cache does with our layers

# How many threads torch computes with on a CPU.
SMALL = 1 << 19  # weights: a product with fewer is over before a second thread has woken up
MOST_TIMED = 1 << 22  # weights; of a larger product a part is timed
ROWS = 16  # a small batch, or the end of a prompt
GAIN = 0.8  # more threads must take less than this share of the time
ROUNDS, ROUND = 5, 2e-3  # of each number of threads; seconds

logger = logging.getLogger("folovllm")


def set_up(config: EngineConfig) -> EngineSetup:
    """Decide what `config` left open. Raises ValueError, before any work, if the configuration cannot be served."""
    from folovllm.models.files import load_hf_config, resolve_model  # here, for ranks do without transformers

    path = resolve_model(config.model)
    hf_config = load_hf_config(path, config)
    quantization = quantization_of(hf_config, config)
    hf_config = quantization.configured(hf_config, config)
    device = choose_device(config.device)
    max_model_len = config.resolve_max_model_len(num_positions(hf_config))
    budget = config.resolve_max_num_batched_tokens(max_model_len)
    dtype = choose_dtype(config.dtype, device, hf_config)
    assert config.max_num_seqs is not None
    wanted_block_size = max_model_len if config.kv_cache == "slots" else config.block_size
    require_experts(config, hf_config)
    check_states(config, hf_config)
    ranks, share = config.tensor_parallel_size, hf_config
    if ranks > 1:  # one rank's part
        share = local_config(hf_config, ranks, bool(config.extras.get("enable_expert_parallel")))
    quantization.check(hf_config, share, config)
    check_gpus(device, config.tensor_parallel_size)
    attention = AttentionConfig(
        num_heads=share.num_attention_heads,
        num_kv_heads=num_kv_heads_of(share),
        head_dim=head_dim_of(share),
        dtype=dtype,
        device=device,
        block_size=wanted_block_size,
        max_num_seqs=config.max_num_seqs,
        long_prompts=config.packed_steps,
        kv_dtype=FP8 if "kv_cache_dtype" in config.extras else None,
    )
    backend, block_size = _choose_attention(config, attention, max_model_len)
    attention = replace(attention, block_size=block_size)
    if config.max_model_len is None:
        logger.info("max_model_len is %d (the model's own limit: %d)", max_model_len, num_positions(hf_config))
    return EngineSetup(
        config=config, path=path, hf_config=hf_config, device=device, dtype=dtype, max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=budget, attention=attention, backend=backend,
        block_size=block_size,
    )  # fmt: skip


def require_experts(config: EngineConfig, hf_config: Any) -> None:
    """Raise ValueError if `config` asks for something that only a mixture of experts has, and the model has none."""
    if config.extras.get("enable_expert_parallel") and not num_experts_of(hf_config):
        raise ValueError("enable_expert_parallel shares out experts, and this model has none: leave it out")
    if config.extras.get("count_experts") and not num_experts_of(hf_config):
        raise ValueError("count_experts counts how often experts are asked, and this model has none: leave it out")


def check_states(config: EngineConfig, hf_config: Any) -> None:
    """Raise ValueError if `config` asks for something that a model with layers of linear attention cannot have."""
    if not num_linear_of(hf_config):
        return
    if "speculative_config" in config.extras:
        raise ValueError(
            "a rejected draft token cannot be taken out of a state again, and this model has layers of linear attention: "
            "leave speculative decoding out"
        )
    if own := {"decode_loop", "prefix_cache"} & {*config.builder_names}:
        raise ValueError(
            f"this model has layers of linear attention, whose states {' and '.join(sorted(own))} of your own does not keep: "
            "leave it out of builders, or take another model"
        )


def _choose_attention(config: EngineConfig, attention: AttentionConfig, max_model_len: int) -> tuple[str, int]:
    """The backend's name, and the tokens of a block, or of a cache that grows."""
    if config.kv_cache == "growing":
        if config.attention_backend != "auto" and (config.attention_backend, config.model_impl) != NAIVE:
            get_backend(str(config.attention_backend))  # an unknown name has an error of its own
            raise ValueError(
                'kv_cache="growing" attends naively with our layers, and in its own way with those of transformers: '
                'leave attention_backend out, take "torch_naive" and model_impl="native", or use milestone="m2"'
            )
        return ("" if config.model_impl == "hf" else "torch_cat"), max_model_len
    return choose_backend(config.attention_backend or "auto", attention)


def choose_device(name: str | None) -> torch.device:
    """The device asked for, or CUDA where there is one, else the CPU."""
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {name!r}: choose cuda or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device {name!r} is not supported: choose cuda or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was asked for, but PyTorch sees no CUDA GPU here: use device='cpu'")
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


def check_gpus(device: torch.device, tensor_parallel_size: int) -> None:
    """Raise ValueError unless each rank of this machine can have a GPU of its own, the ranks' numbers counting from 0."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", tensor_parallel_size))  # under torchrun some are elsewhere
    if device.type != "cuda" or tensor_parallel_size == 1:
        return
    if device.index:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} takes the first GPUs: device {device} cannot be kept"
        )
    if torch.cuda.device_count() < ranks:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} needs {ranks} GPUs here, and there are "
            f"{torch.cuda.device_count()}: lower it, or make more visible (CUDA_VISIBLE_DEVICES)"
        )


def choose_dtype(name: str, device: torch.device, hf_config: Any) -> torch.dtype:
    """The dtype asked for; "auto" is float32 on CPU and the checkpoint's own on a GPU.

    Raises ValueError for bfloat16 on a card that has no instructions for it: kernels do not compile there.
    """
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        card = torch.cuda.get_device_name(device)
        raise ValueError(f"bfloat16 needs a card of compute capability 8.0 or later, and {card} is older: use float16")
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
    if device.type == "cpu":
        return torch.float32
    own = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own)
    if own is torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return own or torch.bfloat16


@dataclass(slots=True)
class _Process:
    """The numbers that we and the user set in this process (default: `OMP_NUM_THREADS`, else the cores)."""

    chosen: int = 0
    limit: int = 0


_process = _Process()


def use_threads(setup: EngineSetup) -> int | None:
    """Set torch's number of threads to `num_threads`, or choose it on a CPU. Returns it; None if it was left alone.

    Threads that share a product wait for each other at its end. Where other programs run too, one of them may have no core
    just then, and the others wait until it has: milliseconds, for a product of microseconds. So a small model gets one
    thread, whatever torch's default is, and a larger one gets as many as a short measurement shows to be of use.

    The number is torch's own: it holds for the whole process, other engines and the user's code included, until the
    next engine is made. The ranks of tensor parallelism divide it among themselves.

    Raises:
        ValueError: more threads than cores were asked for.
    """
    asked, cores, limit = setup.config.num_threads, os.cpu_count() or 1, most_threads()
    if asked is None and setup.device.type != "cpu":
        return None
    if asked is not None and asked > cores:
        raise ValueError(f"num_threads {asked} is more than the {cores} cores of this machine: lower it")
    _process.chosen = asked or choose_threads(setup, limit)
    torch.set_num_threads(_process.chosen)
    if asked is None:
        logger.info("num_threads is %d (torch's own limit: %d)", _process.chosen, limit)
    return _process.chosen


def most_threads() -> int:
    """The number that the user allows: `OMP_NUM_THREADS` or `torch.set_num_threads`, else torch's default."""
    current = torch.get_num_threads()
    if current != _process.chosen:  # not ours
        _process.limit = current
    return _process.limit


def choose_threads(setup: EngineSetup, limit: int) -> int:
    """One for a small model; else double the number as long as that makes the largest product of a layer faster.

    The numbers are those of all ranks together, at most `limit` and the cores that this process may use.
    """
    ranks = 1 if "TORCHELASTIC_RUN_ID" in os.environ else setup.config.tensor_parallel_size  # torchrun's divide nothing
    outputs, inputs = largest_product(setup, ranks)
    is_small = outputs * inputs < SMALL
    if is_small and ranks == 1:
        return 1
    limit = min(limit, num_cores())
    best, most = 1, limit // ranks
    if is_small or most < 2:
        return min(limit, ranks)
    x = torch.ones(ROWS, inputs, dtype=setup.dtype)
    weight = torch.ones(max(1, min(outputs, MOST_TIMED // inputs)), inputs, dtype=setup.dtype)
    while best < most and is_faster(x, weight, best, more := min(2 * best, most)):
        best = more
    return best * ranks


def largest_product(setup: EngineSetup, ranks: int) -> tuple[int, int]:
    """Outputs and inputs of the MLP's first product, as one rank has it."""
    inputs = int(setup.hf_config.hidden_size)
    return int(getattr(setup.hf_config, "intermediate_size", None) or 4 * inputs) // ranks, inputs


def is_faster(x: torch.Tensor, weight: torch.Tensor, fewer: int, more: int) -> bool:
    """Whether `more` threads are clearly faster. They take turns, since the load of the machine changes with time."""
    times: dict[int, list[float]] = {fewer: [], more: []}
    for _ in range(ROUNDS):
        for count, seconds in times.items():
            torch.set_num_threads(count)
            seconds.append(seconds_of(x, weight))
    return statistics.median(times[more]) < GAIN * statistics.median(times[fewer])


def seconds_of(x: torch.Tensor, weight: torch.Tensor) -> float:
    """The mean time of the product of x [T, inputs] and weight [outputs, inputs]. The mean, since waiting must count."""
    F.linear(x, weight)  # wakes the threads
    start, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < ROUND or not count:
        F.linear(x, weight)
        count += 1
    return taken / count
