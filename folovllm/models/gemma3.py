"""Gemma 3, its text part (Gemma Team, 2025): most layers see a sliding window, every sixth sees all, with other angles."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding
from folovllm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel
from folovllm.models.model_config import UnsupportedModel, head_dim_of
from folovllm.models.qwen3 import Qwen3ForCausalLM
from folovllm.step.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class GeluAndMul(nn.Module):
    """GEGLU's element-wise part (Shazeer 2020), with GELU as tanh approximates it."""

    def forward(self, gate_up: Tensor) -> Tensor:
        """[T, 2I] -> [T, I]: gelu(first half) * second half."""
        gate, up = gate_up.chunk(2, dim=-1)  # [T, I] each
        return nn.functional.gelu(gate, approximate="tanh") * up


class Gemma3RMSNorm(RMSNorm):
    """Multiplies by 1 + what the checkpoint has, which would lose digits in half precision: in float32."""

    stored: Tensor  # [size], what the checkpoint has

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__(size, eps)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))

    def weight_loaded(self, factor: float = 1.0) -> None:
        """Turn what was loaded into the factors of a token: (1 + weight) * factor."""
        self.stored = self.weight.detach().clone()
        self.weight.data.add_(1).mul_(factor)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the normed `x`, rounded to its dtype once, at the end; with a residual, that of the sum, and the sum."""
        total = x if residual is None else x + residual
        normed = nn.functional.rms_norm(total.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)
        return normed if residual is None else (normed, total)


class Gemma3MLP(LlamaMLP):
    """With another gate."""

    activation = "gelu_pytorch_tanh", GeluAndMul


class Gemma3DecoderLayer(LlamaDecoderLayer):
    """Norms what attention and MLP give, too, before it is added to the stream."""

    def __init__(self, config: PretrainedConfig, attention: LlamaAttention, layers: LayerSet) -> None:
        super().__init__(config, attention, layers)
        self.pre_feedforward_layernorm = layers.make(RMSNorm, config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = layers.make(RMSNorm, config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor | None, batch: ForwardBatch) -> tuple[Tensor, Tensor | None]:
        x, residual = (self.input_layernorm(x), x) if residual is None else self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, batch))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma3Model(LlamaModel):
    """Layers that slide and layers that do not have an angle table each; embeddings are scaled by sqrt(H)."""

    @staticmethod
    def ropes(config: PretrainedConfig, layers: LayerSet, max_model_len: int) -> list[RotaryEmbedding]:
        own, kinds, tables = copy(config), config.layer_types[: config.num_hidden_layers], {}
        for kind in set(kinds):
            own.rope_parameters = config.rope_parameters[kind]
            tables[kind] = LlamaModel.ropes(own, layers, max_model_len)[0]
        return [tables[kind] for kind in kinds]

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> the embeddings times sqrt(H), [T, H]. The factor is rounded to the model's dtype, as in its training."""
        x = super().embed(input_ids)
        return x * torch.tensor(x.shape[1] ** 0.5, dtype=x.dtype, device="cpu").item()


PLACES = {LlamaMLP: Gemma3MLP, LlamaDecoderLayer: Gemma3DecoderLayer, LlamaModel: Gemma3Model}


class Gemma3ForCausalLM(Qwen3ForCausalLM):
    """The frame with Qwen3's attention, whose heads are normed."""

    def __init__(self, config: PretrainedConfig, layers: LayerSet, max_model_len: int | None = None) -> None:
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
            if getattr(config, name, None):
                raise UnsupportedModel(f"{name} is not supported")
        norms = {RMSNorm: lambda size, eps: layers.make(Gemma3RMSNorm, size, eps)}
        super().__init__(config, layers.having({**PLACES, **norms}), max_model_len)
        if not config.query_pre_attn_scalar > 0:
            raise ValueError(f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, and must be above 0")
        self.query_scale = (head_dim_of(config) / config.query_pre_attn_scalar) ** 0.5

    def weights_loaded(self) -> None:
        """Add 1 to the norms' weights, and let those of the queries make up for scores that backends divide by sqrt(D)."""
        super().weights_loaded()
        for name, module in self.named_modules():
            if isinstance(module, Gemma3RMSNorm):
                module.weight_loaded(self.query_scale if name.endswith("q_norm") else 1.0)
