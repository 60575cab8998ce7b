"""Phi-3 and Phi-4: Llama, in whose checkpoints query, key and value are one matrix already, gate and up another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import MergedColumnParallelLinear, QKVParallelLinear
from folovllm.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class WholeQKV(QKVParallelLinear):
    """One tensor of the checkpoint, whose rows have our order."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *rest: Any) -> None:
        sizes = [(num_heads + 2 * num_kv_heads) * head_dim]
        MergedColumnParallelLinear.__init__(self, hidden_size, sizes, *rest)


class WholeGateUp(MergedColumnParallelLinear):
    """The same for gate and up."""

    def __init__(self, input_size: int, output_sizes: Sequence[int], *rest: Any) -> None:
        super().__init__(input_size, [sum(output_sizes)], *rest)


class Phi3ForCausalLM(LlamaForCausalLM):
    """The frame; each of its layers is one tensor of the checkpoint."""

    packed_modules_mapping: Mapping[str, Sequence[str]] = {}

    def __init__(self, config: PretrainedConfig, layers: LayerSet, max_model_len: int | None = None) -> None:
        whole = {QKVParallelLinear: WholeQKV, MergedColumnParallelLinear: WholeGateUp}
        super().__init__(config, layers.having(whole), max_model_len)
