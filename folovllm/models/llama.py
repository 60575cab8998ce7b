"""Llama, and the frame of the other families: only their attention differs.

Everything runs on a ragged batch: `T` tokens of all sequences end to end, `[T, H]`, with no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import nn

from folovllm.layers.activation import SiluAndMul
from folovllm.layers.attention import Attention
from folovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from folovllm.layers.rotary_embedding import RotaryEmbedding, rope_amplitude, rope_frequencies
from folovllm.models.model_config import (
    UnsupportedModel,
    head_dim_of,
    hidden_act_of,
    num_kv_heads_of,
    num_positions,
    windows_of,
)  # fmt: skip
from folovllm.step.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from folovllm.distributed.sharding import Weight


class LlamaAttention(nn.Module):
    """Projections, position, cache, attention, projection."""

    query_parts: ClassVar[int] = 1  # X5: what `q_proj` gives each head, in units of D: its query, and perhaps a gate

    def __init__(
        self, config: PretrainedConfig, rope: RotaryEmbedding, layers: LayerSet, window: int | None = None
    ) -> None:
        """A token sees `window` tokens (`Attention`)."""
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = num_kv_heads_of(config)
        self.head_dim = head_dim_of(config)
        qkv_bias, output_bias = self.biases(config)
        sizes = (self.query_parts * self.num_heads, self.num_kv_heads, self.head_dim)
        self.qkv_proj = layers.make(
            QKVParallelLinear, config.hidden_size, *sizes, qkv_bias, layers.linear_method_of("self_attn.qkv_proj")
        )
        inner, method = self.num_heads * self.head_dim, layers.linear_method_of("self_attn.o_proj")
        self.o_proj = layers.make(RowParallelLinear, inner, config.hidden_size, output_bias, method)
        self.rope = rope
        self.attn = Attention(window)

    @staticmethod
    def biases(config: PretrainedConfig) -> tuple[bool, bool]:
        """Whether the input projections have a bias, and whether the output projection has one."""
        bias = getattr(config, "attention_bias", False)
        return bias, bias

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        query = self.prepare(self.qkv_proj(x), batch)  # [T, Hq, D]
        return self.o_proj(self.attn(query, batch).flatten(1))

    def prepare(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Rotate queries and keys, cache keys and values: [T, (Hq + 2 Hkv) D] -> the queries, [T, Hq, D]."""
        query, key, value = self.split_heads(qkv)
        query, key = self.rope(batch.positions, query, key)
        self.attn.store(key, value, batch)
        return query

    def split_heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[T, (Hq + 2 Hkv) D] -> views [T, Hq, D], [T, Hkv, D], [T, Hkv, D]."""
        heads = qkv.view(len(qkv), -1, self.head_dim)  # [T, Hq + 2 Hkv, D]
        return torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with gate and up in one matrix product."""

    activation: ClassVar[tuple[str, type[nn.Module]]] = "silu", SiluAndMul  # its name in a config

    def __init__(self, config: PretrainedConfig, layers: LayerSet) -> None:
        super().__init__()
        (name, activation), requested = self.activation, hidden_act_of(config)
        if requested != name:
            raise UnsupportedModel(f"hidden_act {requested!r} is not supported: only {name!r} is")
        hidden, inner, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.gate_up_proj = layers.make(
            MergedColumnParallelLinear, hidden, [inner] * 2, bias, layers.linear_method_of("mlp.gate_up_proj")
        )
        self.down_proj = layers.make(RowParallelLinear, inner, hidden, bias, layers.linear_method_of("mlp.down_proj"))
        self.act_fn = layers.make(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream and added back to it.

    An addition waits for the norm that follows it, so that one kernel can do both. So a layer gets `x`, the last MLP's
    output, and `residual`, the stream without it; and passes on its own two.
    """

    def __init__(self, config: PretrainedConfig, attention: LlamaAttention, layers: LayerSet) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = layers.make(LlamaMLP, config, layers)
        self.input_layernorm = layers.make(RMSNorm, config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = layers.make(RMSNorm, config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Two [T, H] -> two [T, H]; `residual` None: nothing waits to be added (first layer; M6's fused layers add at once)."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, batch), residual)
        return self.mlp(x), residual

    def weights_loaded(self) -> None:
        """Prepare what depends on the weights; called whenever a checkpoint has filled them. Does nothing here."""


class LlamaModel(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self, config: PretrainedConfig, attention_of: Sequence[Callable[..., Any]], layers: LayerSet, max_model_len: int
    ) -> None:
        """`attention_of`: what makes the attention of each layer."""
        super().__init__()
        self.embed_tokens = layers.make(VocabParallelEmbedding, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList()
        each = zip(attention_of, self.ropes(config, layers, max_model_len), windows_of(config), strict=True)
        for i, (attention_class, rope, window) in enumerate(each):
            inner = layers.within(f"model.layers.{i}")
            attention = layers.make(attention_class, config, rope, inner, window)
            self.layers.append(layers.make(LlamaDecoderLayer, config, attention, inner))
        self.norm = layers.make(RMSNorm, config.hidden_size, config.rms_norm_eps)

    @staticmethod
    def ropes(config: PretrainedConfig, layers: LayerSet, max_model_len: int) -> list[RotaryEmbedding]:
        """Return the table of angles of each layer: one that all share."""
        frequencies, amplitude = rope_frequencies(config, head_dim_of(config)), rope_amplitude(config)
        return [layers.make(RotaryEmbedding, frequencies, max_model_len, amplitude)] * config.num_hidden_layers

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> what the first layer gets, [T, H]."""
        return self.embed_tokens(input_ids)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The batch's tokens -> their last hidden states, [T, H]."""
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return self.norm(x) if residual is None else self.norm(x, residual)[0]


class LlamaForCausalLM(nn.Module):
    """The model with its head. A family is a subclass that names another attention class."""

    attention_class: ClassVar[type[LlamaAttention]] = LlamaAttention
    packed_modules_mapping: Mapping[str, Sequence[str]] = {  # our module: the checkpoint's, in the order of its rows
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    # From here on for electives' families; M1's leave all as it is.
    renamed: ClassVar[dict[str, str]] = {}  # parts of names in the checkpoint: what they are called here
    shard: ClassVar[Callable[..., torch.Tensor] | None] = None  # of tensors that a family alone has
    reorder: Callable[[str, Weight], torch.Tensor] | None = None  # (name, tensor) -> in this model's order
    takes_experts: ClassVar[bool] = False  # whether mixtures of experts may stand in the places of its MLPs
    mtp_head: ClassVar[type[nn.Module] | None] = None  # a `DraftHead`, if the family's checkpoints hold one that drafts

    def __init__(self, config: PretrainedConfig, layers: LayerSet, max_model_len: int | None = None) -> None:
        super().__init__()
        limit, self.counters = max_model_len or num_positions(config), layers.counters or {}
        self.model = layers.make(LlamaModel, config, self.attention_classes(config), layers, limit)
        self.lm_head = layers.make(ParallelLMHead, config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @classmethod
    def attention_classes(cls, config: PretrainedConfig) -> Sequence[Callable[..., Any]]:
        """What makes the attention of each layer: here one class for all. Each takes the arguments of `LlamaAttention`."""
        return [cls.attention_class] * config.num_hidden_layers

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """The hidden states of all new tokens, [T, H]; their K/V are in the caches afterwards."""
        return self.model(batch)

    def compute_logits(
        self, hidden: torch.Tensor, batch: ForwardBatch, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[T, H] -> [S, V]: for each sequence's last new token alone, in the dtype of the model; in `out` if given."""
        only_decodes = len(batch.logits_indices) == len(hidden)  # then every token is its sequence's last
        return self.lm_head(hidden if only_decodes else hidden[batch.logits_indices], out)

    def local_name(self, name: str) -> str | None:
        """What a tensor of the checkpoint is called here: in M1 the same. None if it is another rank's (M6)."""
        for theirs, ours in self.renamed.items():
            name = name.replace(theirs, ours)
        return name

    def local_tensors(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """What a tensor of the checkpoint holds for this rank, by our names: views of it. In an elective's family it may hold several."""
        named = self.local_name(name)
        return [] if named is None else [(named, tensor)]

    def checkpoint_name(self, name: str) -> str:
        """What the checkpoint calls a tensor of ours: the inverse of `local_name`."""
        for theirs, ours in self.renamed.items():
            name = name.replace(ours, theirs)
        return name

    def stored_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A loaded tensor of ours, by our name, as the checkpoint has it: itself, or a copy where it is kept in another form."""
        return weight

    def weights_loaded(self) -> None:
        """Call this when the weights have changed: some linear methods and layers keep them in another form."""
        for module in self.modules():
            if isinstance(module, LinearBase):
                module.linear_method.loaded(module)
        for layer in self.model.layers:
            cast(LlamaDecoderLayer, layer).weights_loaded()


class MistralForCausalLM(LlamaForCausalLM):
    """Llama under Mistral's name. Some of its layers see no further than a sliding window (`windows_of`)."""
