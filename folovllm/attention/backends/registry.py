"""Attention backends by name. Nothing is imported before it is asked for: FoloVLLM alone needs no Triton and no GPU."""

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
    """The class behind a name, or behind "prefill,decode"; its `check_available` then says whether it runs here.

    Raises:
        ValueError: no backend of that name; the message lists those there are.
        BackendUnavailable: a package that it is built on is not installed.
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
    """The backend, with what it needs around it to read the cache that `config` asks for."""
    backend = get_backend(name)(config)
    return DecodedCache(backend) if config.is_fp8 and not backend.reads_fp8 else backend
