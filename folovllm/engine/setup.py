"""What is decided before a weight is loaded: an `EngineConfig` that met a model and a machine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from folovllm import plugins
from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.attention.backends.registry import choose_backend
from folovllm.config import EngineConfig
from folovllm.distributed.sharding import check_gpus, local_config
from folovllm.learn import builders
from folovllm.models.model_config import head_dim_of, num_kv_heads_of, num_linear_of, num_positions
from folovllm.models.registry import quantization_hook
from folovllm.step.kv_format import FP8

logger = logging.getLogger("folovllm")


@dataclass(slots=True, frozen=True)
class EngineSetup:
    """Every choice of an engine."""

    config: EngineConfig
    path: Path
    hf_config: Any
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    attention: AttentionConfig
    backend: str  # name of the attention backend; "" where Hugging Face attends
    block_size: int  # tokens a block, or a slot, holds

    @property
    def vocab_size(self) -> int:
        """V: rows of the embedding, the bound of all token ids."""
        return int(self.hf_config.vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers, on one rank."""
        config, a = self.hf_config, self.attention
        num_kv_layers = config.num_hidden_layers - num_linear_of(config)  # X5: layers of linear attention keep no K/V
        return 2 * num_kv_layers * a.num_kv_heads * a.head_dim * (a.kv_dtype or self.dtype).itemsize


def set_up(config: EngineConfig) -> EngineSetup:
    """Decide what `config` left open. Raises ValueError if the configuration cannot be served."""
    from folovllm.models.files import load_hf_config, resolve_model  # here, for ranks do without transformers

    path = resolve_model(config.model)
    hf_config = load_hf_config(path, config)
    quantization = quantization_hook(hf_config, config)
    if quantization is not None:
        hf_config = quantization.configured(hf_config, config)
    device = choose_device(config.device)
    max_model_len = config.resolve_max_model_len(num_positions(hf_config))
    dtype = choose_dtype(config.dtype, device, hf_config)
    assert config.max_num_seqs is not None
    if config.extras:
        plugins.check_model(config, hf_config)
    if config.builder_names:
        builders.require_no_states(config.builder_names, num_linear_of(hf_config))
    ranks, share = config.tensor_parallel_size, hf_config
    if ranks > 1:  # one rank's part
        check_gpus(device, ranks)
        share = local_config(hf_config, ranks, bool(config.extras.get("enable_expert_parallel")))
    if quantization is not None:
        quantization.check(hf_config, share, config)
    attention = AttentionConfig(
        num_heads=share.num_attention_heads,
        num_kv_heads=num_kv_heads_of(share),
        head_dim=head_dim_of(share),
        dtype=dtype,
        device=device,
        block_size=max_model_len if config.kv_cache == "slots" else config.block_size,
        max_num_seqs=config.max_num_seqs,
        long_prompts=config.packed_steps,
        kv_dtype=FP8 if "kv_cache_dtype" in config.extras else None,
    )
    if config.kv_cache == "growing":  # "torch_cat" is M1's own backend, which users call "torch_naive"
        backend, block_size = ("" if config.model_impl == "hf" else "torch_cat"), max_model_len
    else:
        backend, block_size = choose_backend(config.attention_backend or "auto", attention)
    if config.max_model_len is None:
        logger.info("max_model_len is %d (the model's own limit: %d)", max_model_len, num_positions(hf_config))
    budget = config.resolve_max_num_batched_tokens(max_model_len)
    return EngineSetup(
        config, path, hf_config, device, dtype, max_model_len, config.max_num_seqs, budget,
        replace(attention, block_size=block_size), backend, block_size,
    )  # fmt: skip


def choose_device(name: str | None) -> torch.device:
    """The device requested, or CUDA where there is one, else the CPU."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {name!r}: choose cuda or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device {name!r} is not supported: choose cuda or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' was asked for, but PyTorch sees no CUDA GPU here: use device='cpu'")
    return torch.device("cuda", 0) if device == torch.device("cuda") else device


def choose_dtype(name: str, device: torch.device, hf_config: Any) -> torch.dtype:
    """The dtype requested; "auto" is float32 on CPU and the checkpoint's own on a GPU, or float16 where a card lacks bfloat16."""
    if name == "auto" and device.type == "cpu":
        return torch.float32
    own = getattr(hf_config, "dtype", None) or getattr(hf_config, "torch_dtype", None) or torch.bfloat16
    dtype: torch.dtype = getattr(torch, str(own if name == "auto" else name).removeprefix("torch."))
    if dtype is not torch.bfloat16 or device.type == "cpu" or torch.cuda.is_bf16_supported(including_emulation=False):
        return dtype
    if name == "auto":
        return torch.float16
    card = torch.cuda.get_device_name(device)
    raise ValueError(f"bfloat16 needs a card of compute capability 8.0 or later, and {card} is older: use float16")
