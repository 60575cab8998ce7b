"""Hybrid models: most layers keep a state (Gated DeltaNet), every fourth or so attends to all tokens, with a gate behind it."""

from __future__ import annotations

from copy import copy
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from folovllm.distributed.sharding import Rows, shard_column, shard_row
from folovllm.electives.hybrid.gated_attention import GatedAttention, PartialRotaryEmbedding
from folovllm.electives.hybrid.gated_delta_net import GatedDeltaNet
from folovllm.electives.hybrid.mtp import MtpHead
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding, rope_frequencies
from folovllm.models.gemma3 import Gemma3RMSNorm
from folovllm.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from folovllm.models.model_config import LINEAR, head_dim_of, rope_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from transformers import PretrainedConfig

    from folovllm.distributed.sharding import Weight

SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip


class HybridModel(LlamaModel):
    """Rotates a part of each head."""

    @staticmethod
    def ropes(config: PretrainedConfig, layers: LayerSet, max_model_len: int) -> list[RotaryEmbedding]:
        """Return the one table of angles for each layer; only layers of full attention read it."""
        whole, parameters = copy(config), dict(rope_parameters(config))
        part = float(parameters.pop("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)))
        if not 0 < part <= 1:
            raise ValueError(
                f"partial_rotary_factor is {part} in the model's configuration, and must be above 0 and at most 1"
            )
        whole.rope_parameters = parameters
        table = PartialRotaryEmbedding(rope_frequencies(whole, int(part * head_dim_of(config))), max_model_len)
        return [table] * config.num_hidden_layers


class HybridForCausalLM(LlamaForCausalLM):
    """A causal LM whose `layer_types` chooses linear or full attention for each layer.

    Checkpoints call linear attention `linear_attn`; here it stands where attention does. The weights of the head for multi-token
    prediction (`mtp`) are loaded where somebody drafts with it, those of the vision encoder (`visual`) never.
    """

    attention_class = GatedAttention
    takes_experts = True
    mtp_head = MtpHead
    renamed: ClassVar[dict[str, str]] = {"linear_attn.": "self_attn.", "model.language_model.": "model."}

    def __init__(self, config: PretrainedConfig, layers: LayerSet, max_model_len: int | None = None) -> None:
        check_linear_attention(config)
        if layers.kernels:
            from folovllm.electives.hybrid.fused import hybrid_kernels  # here, for not every machine has Triton

            layers = layers.having(hybrid_kernels(head_dim_of(config)))
        norms = {RMSNorm: lambda size, eps: layers.make(Gemma3RMSNorm, size, eps)}
        # Keep the plain decoder layer. The fused one folds the norm into the projections and scales their outputs later;
        # the gates b and a cannot be scaled later.
        places: dict[Any, Any] = {LlamaModel: HybridModel, LlamaDecoderLayer: LlamaDecoderLayer}
        super().__init__(config, layers.having({**places, **norms}), max_model_len)
        self.layer_types: list[str] = config.layer_types
        self.is_nested = False  # whether the checkpoint has the text model beside another one

    @classmethod
    def attention_classes(cls, config: PretrainedConfig) -> list[Callable[..., Any]]:
        def linear(config: PretrainedConfig, rope: Any, layers: LayerSet, window: Any) -> GatedDeltaNet:
            return layers.make(GatedDeltaNet, config, layers, "in_proj_qkvz" not in cls.packed_modules_mapping)

        return [linear if kind == LINEAR else cls.attention_class for kind in config.layer_types]

    def local_name(self, name: str) -> str | None:
        if name.startswith(("mtp.", "model.visual.")):
            return None
        self.is_nested |= name.startswith("model.language_model.")
        return super().local_name(name)

    def checkpoint_name(self, name: str) -> str:
        before, layer, behind = name.partition(".self_attn.")
        if layer and self.layer_types[int(before.rpartition(".")[2])] == LINEAR:
            name = f"{before}.linear_attn.{behind}"
        return name.replace("model.", "model.language_model.", 1) if self.is_nested else name

    def weights_loaded(self) -> None:
        """Add 1 to the norms' weights, which checkpoints keep around 0."""
        super().weights_loaded()
        for module in self.modules():
            if isinstance(module, Gemma3RMSNorm):
                module.weight_loaded()

    @classmethod
    def shard(
        cls,
        config: PretrainedConfig,
        name: str,
        weight: Weight,
        rank: int,
        size: int,
        usual: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Give each rank whole key heads of linear attention, and the value heads that they serve. `reorder` asks for one rank's.

        `config` is the whole model's, `name` what the tensor is called here. `usual(name, weight)` cuts what all families have.
        """
        match name.split(".")[-2:]:
            case ["in_proj_qkv" | "conv1d", _]:  # queries, keys and values, each of all heads
                keys = config.linear_num_key_heads * config.linear_key_head_dim
                ends = (0, keys, 2 * keys, 2 * keys + config.linear_num_value_heads * config.linear_value_head_dim)
                return torch.cat([shard_column(Rows(weight, *part), rank, size) for part in pairwise(ends)])
            case ["in_proj_qkvz", _]:  # of Qwen3-Next, key head by key head; brought into the order of Qwen3.5's
                heads, rows = config.linear_num_key_heads // size, rows_of_key_head(config)
                starts = range(rank * heads * sum(rows), (rank + 1) * heads * sum(rows), sum(rows))
                parts = pairwise((0, *accumulate(rows)))
                return torch.cat([weight[start + a : start + b] for a, b in parts for start in starts])
            case ["in_proj_ba" | "in_proj_z" | "in_proj_b" | "in_proj_a", _] | ["self_attn", "A_log" | "dt_bias"]:
                return shard_column(weight, rank, size)
            case ["out_proj", _]:
                return shard_row(weight, rank, size)
        return usual(name, weight)


def check_linear_attention(config: PretrainedConfig) -> None:
    """Raise ValueError, which names the field, if the sizes of linear attention make no layer."""
    where = "in the model's configuration, and must be"
    for name in SIZES:
        if not isinstance(value := getattr(config, name, None), int) or value < 1:
            raise ValueError(f"{name} is {value!r} {where} a whole number of at least 1")
    values, keys = config.linear_num_value_heads, config.linear_num_key_heads
    if values % keys:
        raise ValueError(f"linear_num_value_heads is {values} {where} a multiple of linear_num_key_heads, {keys}")


def rows_of_key_head(config: PretrainedConfig) -> list[int]:
    """Return how many rows of q, k, v and z a key head has in Qwen3-Next's `in_proj_qkvz`."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    return [config.linear_key_head_dim] * 2 + [values] * 2


class Qwen3NextForCausalLM(HybridForCausalLM):
    """Qwen3-Next. The input projections of its checkpoints go key head by key head: [q, k, v, z] of the first one, then of the next."""

    def __init__(self, config: PretrainedConfig, layers: LayerSet, max_model_len: int | None = None) -> None:
        super().__init__(config, layers, max_model_len)
        self.reorder = partial(self.shard, config, rank=0, size=1, usual=lambda _, weight: weight[:])
        self.num_key_heads, self.rows_of_key_head = config.linear_num_key_heads, rows_of_key_head(config)

    def stored_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        if not name.endswith("in_proj_qkvz.weight"):
            return weight
        parts = weight.split([self.num_key_heads * rows for rows in self.rows_of_key_head])
        return torch.cat([part.unflatten(0, (self.num_key_heads, -1)) for part in parts], 1).flatten(0, 1)


class Qwen3_5ForCausalLM(HybridForCausalLM):
    """Qwen3.5, its text model."""

    packed_modules_mapping: Mapping[str, Sequence[str]] = {
        **LlamaForCausalLM.packed_modules_mapping,
        "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"],
        "in_proj_ba": ["in_proj_b", "in_proj_a"],
    }


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with experts, which the registry puts in."""
