"""Our model with its weights, and its attention layers in order."""

from __future__ import annotations

from folovllm.engine.setup import EngineSetup
from folovllm.layers.attention import Attention
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import init_random_weights, load_model
from folovllm.models.registry import build_model


def load_native_model(setup: EngineSetup) -> LlamaForCausalLM:
    """Build the model on its device, then load its weights, or make them up where `random_weights` asks for it."""
    model = build_model(setup.hf_config, setup.dtype, setup.device)
    if setup.config.random_weights:
        init_random_weights(model, setup.config.seed)
    else:
        load_model(model, setup.path, use_tqdm=setup.config.use_tqdm)
    return model


def attention_layers(model: LlamaForCausalLM) -> list[Attention]:
    """The layers that need a cache and a backend, first to last."""
    return [module for module in model.modules() if isinstance(module, Attention)]
