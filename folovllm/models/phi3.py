"""Phi-3 and Phi-4: Llama, in whose checkpoints query, key and value are one matrix already, gate and up another."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import MergedColumnParallelLinear
from folovllm.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Phi3ForCausalLM(LlamaForCausalLM):
    """The frame; each of its layers is one tensor of the checkpoint, whose rows have our order."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}

    def __init__(self, config: PretrainedConfig, layers: LayerSet, max_model_len: int | None = None) -> None:
        super().__init__(config, layers, max_model_len)
        for module in self.modules():
            if isinstance(module, MergedColumnParallelLinear):
                module.output_sizes = [sum(module.output_sizes)]
