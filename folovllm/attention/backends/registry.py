"""Attention backends by name, and which one is chosen. A backend is imported at its first use, so FoloVLLM works without Triton."""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib import import_module

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.attention.backends.decoded import DecodedCache, check_fp8

logger = logging.getLogger("folovllm")

BACKENDS: dict[str, str] = {
    "torch_naive": "folovllm.attention.backends.torch_naive:TorchNaiveBackend",
    "torch_paged": "folovllm.attention.backends.torch_paged:TorchPagedBackend",
    "triton": "folovllm.attention.backends.triton:TritonBackend",
    "flash_attn": "folovllm.attention.backends.flash_attn:FlashAttentionBackend",
}
BLOCK_SIZES = (16, 32, 64, 128, 256)  # to choose from
# The faster first, as measured in docs/performance_log.md. Triton's interpreter must be chosen by name.
AUTO_ORDER = {"cuda": ("triton", "flash_attn", "torch_paged"), "cpu": ("torch_paged",)}


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the class of a name. Raises ValueError for an unknown one, `BackendUnavailable` without a package that it needs."""
    if name not in BACKENDS:
        raise ValueError(f"unknown attention_backend {name!r}: choose one of {', '.join(BACKENDS)}")
    module, _, symbol = BACKENDS[name].partition(":")
    try:
        backend: type[AttentionBackend] = getattr(import_module(module), symbol)
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"attention_backend {name!r} needs the package {error.name!r}: install it, or choose another backend"
        ) from error
    return backend


def make_backend(name: str, config: AttentionConfig) -> AttentionBackend:
    """Return the backend, wrapped in a `DecodedCache` if the cache is FP8 and the backend cannot read it."""
    backend = get_backend(name)(config)
    return DecodedCache(backend) if config.is_fp8 and not backend.reads_fp8 else backend


def choose_backend(name: str, config: AttentionConfig) -> tuple[str, int]:
    """Return the backend's name and the block size. Raises `BackendUnavailable` if none can run here, ValueError for an unknown name."""
    if name != "auto":
        return name, _checked(get_backend(name), config)
    reasons = []
    for candidate in AUTO_ORDER[config.device.type]:
        try:
            block_size = _checked(get_backend(candidate), config)
        except BackendUnavailable as error:
            reasons.append(f"{candidate}: {error}")
            continue
        logger.info("attention backend %s%s", candidate, f" ({'; '.join(reasons)})" if reasons else "")
        return candidate, block_size
    raise BackendUnavailable(f"no attention backend can run here: {'; '.join(reasons)}")


def _checked(backend: type[AttentionBackend], config: AttentionConfig) -> int:
    """Return the block size to use. Raises `BackendUnavailable` if the backend cannot run with it."""
    size = config.block_size or next(size for size in BLOCK_SIZES if backend.supports_block_size(size))
    backend.check_available(replace(config, block_size=size))
    if config.is_fp8:
        check_fp8(backend, config)
    if not backend.supports_block_size(size):
        raise BackendUnavailable(
            f"{backend.name} cannot use blocks of {size} tokens: leave block_size open, or choose another backend"
        )
    return size
