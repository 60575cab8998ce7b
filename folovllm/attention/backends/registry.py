"""Attention backends by name. A backend is imported at its first use, so FoloVLLM works without Triton and without a GPU."""

from __future__ import annotations

from importlib import import_module

from folovllm.attention.backends.abstract import AttentionBackend, AttentionConfig, BackendUnavailable
from folovllm.attention.backends.composite import compose
from folovllm.attention.backends.decoded import DecodedCache

BACKENDS: dict[str, str] = {
    "torch_cat": "folovllm.attention.backends.torch_cat:TorchCatBackend",
    "torch_naive": "folovllm.attention.backends.torch_naive:TorchNaiveBackend",
    "torch_paged": "folovllm.attention.backends.torch_paged:TorchPagedBackend",
    "triton": "folovllm.attention.backends.triton:TritonBackend",
    "flash_attn": "folovllm.attention.backends.flash_attn:FlashAttentionBackend",
}


def get_backend(name: str) -> type[AttentionBackend]:
    """Return the class of a name, or of "prefill,decode". Its `check_available` tells whether it can run here.

    Raises:
        ValueError: there is no backend of that name; the message lists all names.
        BackendUnavailable: a package that the backend needs is not installed.
    """
    prefill, comma, decode = name.partition(",")
    if comma and "," not in decode:
        return compose(get_backend(prefill), get_backend(decode))
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
