"""Which attention backend runs, and with blocks of how many tokens."""

from __future__ import annotations

import logging
from dataclasses import replace

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.attention.backends.registry import get_backend

logger = logging.getLogger("folovllm")

BLOCK_SIZES = (16, 32, 64, 128, 256)  # to choose from
# The faster first, as docs/performance_log.md measured them. Triton's interpreter is for those who ask for it.
AUTO_ORDER = {"cuda": ("triton", "flash_attn", "torch_paged"), "cpu": ("torch_paged",)}


def choose_backend(name: str, config: AttentionConfig) -> tuple[str, int]:
    """The backend's name and the block size, both checked before any weight is loaded.

    Raises:
        BackendUnavailable: it cannot run here. ValueError: there is no such backend.
    """
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
    """The block size to use, if the backend can run with it."""
    size = config.block_size or next(size for size in BLOCK_SIZES if backend.supports_block_size(size))
    backend.check_available(replace(config, block_size=size))
    if not backend.supports_block_size(size):
        raise BackendUnavailable(
            f"{backend.name} cannot use blocks of {size} tokens: leave block_size open, or choose another backend"
        )
    return size
