"""Models by the architecture name in their `config.json`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from folovllm.layers.layer_set import LayerSet

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from folovllm.models.llama import LlamaForCausalLM

ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "folovllm.models.llama",
    "MistralForCausalLM": "folovllm.models.mistral",
    "Qwen2ForCausalLM": "folovllm.models.qwen2",
    "Qwen3ForCausalLM": "folovllm.models.qwen3",
}


PLAIN_LAYERS = LayerSet()


def get_model_class(hf_config: PretrainedConfig) -> type[LlamaForCausalLM]:
    """The class for the first known name among `hf_config.architectures`; its module is imported here.

    Raises:
        ValueError: none of them is known, or the weights are quantized.
    """
    names: list[str] = getattr(hf_config, "architectures", None) or []
    name = next((name for name in names if name in ARCHITECTURES), None)
    if name is None:
        raise ValueError(
            f"no model for architecture {', '.join(names) or '(none named)'}: "
            f"the known ones are {', '.join(ARCHITECTURES)}"
        )
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ValueError("quantized checkpoints are not supported: use one with plain float weights")
    return getattr(import_module(ARCHITECTURES[name]), name)


def build_model(
    hf_config: PretrainedConfig, dtype: torch.dtype, device: torch.device | str, layers: LayerSet = PLAIN_LAYERS
) -> LlamaForCausalLM:
    """The model on `device` in `dtype`, its weights uninitialised: `load_model` or `init_random_weights` comes next.

    Args:
        layers: what it is built from.

    Raises:
        ValueError: an unknown architecture, or a feature of the config that no layer here has.
    """
    model_class = get_model_class(hf_config)
    with torch.device(device), _default_dtype(dtype):
        return model_class(hf_config, layers).requires_grad_(False).eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
