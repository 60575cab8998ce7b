"""Forward passes without an engine: sequences of one length, all of their tokens at once, and no cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.attention.backends.abstract import AttentionBackend
from folovllm.attention.ops import create_causal_mask
from folovllm.layers.attention import attention_layers
from folovllm.models.llama import LlamaForCausalLM
from folovllm.step.forward_batch import ForwardBatch

TOKENS_AT_ONCE = 4096  # more would only need more memory


class WholeSequences(AttentionBackend):
    """Causal attention within sequences of `length` tokens, of which every one is new. It sees `window` tokens back, or all."""

    name = "whole"

    def __init__(self, length: int, window: int | None = None) -> None:
        self.length, self.window = length, window

    def store(self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Keep `key` and `value` [n * length, Hkv, D] for `forward`, which comes next."""
        self.new = key, value

    def forward(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[n * length, Hq, D] -> the same shape."""
        q, k, v = (
            x.unflatten(0, (-1, self.length)).transpose(1, 2) for x in (query, *self.new)
        )  # [n, heads, length, D]
        mask = create_causal_mask(self.length, self.length, q.device).triu(1 - (self.window or self.length))
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def attend_within(module: nn.Module, length: int) -> None:
    """Let all attention layers of `module` attend within sequences of `length` tokens."""
    for layer in attention_layers(module):
        layer.backend = WholeSequences(length, layer.window)
        layer.kv_cache = torch.empty(0)


def whole_batch(ids: torch.Tensor) -> ForwardBatch:
    """Return the batch of `ids` [n, length] for a model whose layers `attend_within`; it knows of no cache."""
    count, length = ids.shape
    none = torch.empty(0, dtype=torch.int64, device=ids.device)
    return ForwardBatch(
        input_ids=ids.flatten(), positions=torch.arange(length, device=ids.device).repeat(count), slot_mapping=none,
        query_start_loc=none, seq_lens=none, block_tables=none, logits_indices=none, num_seqs=count, num_decodes=0,
        max_query_len=length, max_seq_len=length, query_lens_host=[length] * count, seq_lens_host=[length] * count,
    )  # fmt: skip


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits after every token of `ids` [n, length]: [n, length, V], in the dtype of the model.

    The model's own caches, if it has any, are not used, and have to be bound again afterwards.
    """
    attend_within(model, ids.shape[1])
    return model.lm_head(model(whole_batch(ids))).unflatten(0, ids.shape)
