"""Find a model's class by the architecture name in its `config.json`, find the hook for its quantization, and build it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from folovllm.config import EngineConfig
from folovllm.layers.layer_set import LayerSet
from folovllm.models.model_config import UnsupportedModel, num_experts_of
from folovllm.plugins import EXPERTS, MODELS, QUANTIZATION, load_elective

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from folovllm.models.llama import LlamaForCausalLM
    from folovllm.models.quantization import Quantization

ARCHITECTURES: dict[str, str] = {
    "Gemma3ForCausalLM": "folovllm.models.gemma3",
    "LlamaForCausalLM": "folovllm.models.llama",
    "MistralForCausalLM": "folovllm.models.llama",
    "Phi3ForCausalLM": "folovllm.models.phi3",
    "Qwen2ForCausalLM": "folovllm.models.qwen2",
    "Qwen3ForCausalLM": "folovllm.models.qwen3",
}
PLAIN_LAYERS = LayerSet()


def quantization_hook(hf_config: PretrainedConfig, config: EngineConfig | None = None) -> Quantization | None:
    """Return the hook for quantized models (`Quantization`); None if neither checkpoint nor `config` asks for quantization."""
    in_config = config is not None and "quantization" in config.extras
    if not in_config and getattr(hf_config, "quantization_config", None) is None:
        return None
    found: Quantization = load_elective(QUANTIZATION, "a quantized model (`quantization_config`)")()
    return found


def get_model_class(hf_config: PretrainedConfig) -> type[LlamaForCausalLM]:
    """Return the class of the first known name among `hf_config.architectures`, with experts where it takes some and the model has some.

    Raises UnsupportedModel if none is known, ValueError if its package is not installed.
    """
    names: list[str] = getattr(hf_config, "architectures", None) or []
    known = ARCHITECTURES | MODELS
    name = next((name for name in names if name in known), None)
    if name is None:
        raise UnsupportedModel(
            f"no model for architecture {', '.join(names) or '(none named)'}: the known ones are {', '.join(sorted(known))}"
        )
    found: type[LlamaForCausalLM]
    if name in ARCHITECTURES:
        found = getattr(import_module(ARCHITECTURES[name]), name)
    else:
        found = load_elective(f"{MODELS[name]}:{name}", f"a model of architecture {name}")
    if found.takes_experts and num_experts_of(hf_config):
        found = load_elective(EXPERTS, f"a model of architecture {name} with experts").with_experts(found)
    return found


def build_model(
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    max_model_len: int | None = None,
    layers: LayerSet = PLAIN_LAYERS,
) -> LlamaForCausalLM:
    """The model on `device` in `dtype`, its weights uninitialised: `load_model` or `init_random_weights` comes next.

    `max_model_len`: positions that it must know; by default all that the config allows, which may be millions.

    Raises UnsupportedModel for what no class or layer here has, ValueError for another mistake in the configuration.
    """
    try:
        model_class = get_model_class(hf_config)
        if (hook := quantization_hook(hf_config)) is not None:
            packed, renamed = model_class.packed_modules_mapping, model_class.renamed
            layers = replace(layers, quantized=hook.linear_methods_of(hf_config, packed, renamed))
        with torch.device(device), default_dtype(dtype):
            return model_class(hf_config, layers, max_model_len).requires_grad_(False).eval()
    except UnsupportedModel as error:
        from folovllm.models.checked_config import who_runs_it

        raise UnsupportedModel(f"{error}{who_runs_it(hf_config)}") from error


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
