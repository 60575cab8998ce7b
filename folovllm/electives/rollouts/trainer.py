"""The engine's model under autograd: log-probabilities that equal the engine's bit by bit, and have gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch.func import functional_call

from folovllm.electives.rollouts.attention import padded_sdpa
from folovllm.electives.rollouts.extension import invariant_backend, invariant_layers
from folovllm.electives.rollouts.tiles import with_plain_backward
from folovllm.electives.rollouts.weights import weights_of
from folovllm.layers.attention import attention_layers
from folovllm.layers.layer_set import LayerSet
from folovllm.llm import LLM
from folovllm.models.llama import LlamaAttention
from folovllm.models.loader import load_model
from folovllm.models.registry import build_model, get_model_class
from folovllm.step.forward_batch import ForwardBatch


class Policy:
    """A model to train: a copy of an engine's, built from the layers of `batch_invariant=True`, in the engine's dtype.

    Attributes:
        model: its parameters are those of an optimizer.
    """

    def __init__(self, llm: LLM, layers: LayerSet | None = None) -> None:
        """`layers`: others than the engine's, to compare with. Raises ValueError as `LLM.get_weights` does."""
        setup = llm.engine.setup
        layers = invariant_layers(setup) if layers is None else layers
        attention_class = get_model_class(setup.hf_config).attention_class
        base = cast(type, layers.replacements.get(attention_class, attention_class))
        trained = type("Trained", (TrainedAttention, base), {})
        layers = layers.having({attention_class: trained}, layers.linear_method)
        self.device = setup.device
        self.model = build_model(setup.hf_config, setup.dtype, setup.device, setup.max_model_len, layers)
        load_model(self.model, llm.get_weights().items(), use_tqdm=False)
        self.model.requires_grad_(True)
        self._setup = setup
        self._backend = invariant_backend(setup)
        for layer in attention_layers(self.model):
            layer.bind(self._backend)

    def logprobs(self, sequences: Sequence[Sequence[int]], num_prompt_tokens: Sequence[int]) -> list[torch.Tensor]:
        """Return the log-probabilities of each sequence's tokens behind its prompt, under the model's own distribution.

        Without autograd, or with it, they are the same bits; and those that the engine reports for `logprobs=0`.

        Args:
            sequences: token ids of prompt and answer. num_prompt_tokens: how many are the prompt, at least 1.

        Returns:
            For each sequence a tensor [number of answer tokens], float32.
        """
        batch = batch_of(sequences, self._setup.block_size, self.device)
        prompt_lens = torch.tensor(num_prompt_tokens, device=self.device)
        at = (batch.positions >= prompt_lens.repeat_interleave(batch.seq_lens)).nonzero()[:, 0]  # the answers' tokens
        self._backend.plan(batch)
        self._allocate_kv_cache(int(batch.block_tables.max()) + 1)
        logits = self.model.compute_logits(self.model(batch), replace(batch, logits_indices=at - 1))
        found = logits.float().log_softmax(-1).gather(1, batch.input_ids[at][:, None])[:, 0]
        return list(found.split((batch.seq_lens - prompt_lens).tolist()))

    def _allocate_kv_cache(self, num_blocks: int) -> None:
        """Give the layers a cache laid out as the engine's. One is enough: each layer reads only what it has just written."""
        config = self._setup.attention
        shape = 2, num_blocks, config.num_kv_heads, self._setup.block_size, config.head_dim
        cache = torch.empty(shape, dtype=config.dtype, device=config.device).transpose(2, 3)
        for layer in attention_layers(self.model):
            layer.kv_cache = cache

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by the checkpoint's names, as `LLM.update_weights` takes them. They are views, not copies."""
        return weights_of(self.model)


class TrainedAttention(LlamaAttention):
    """Goes forward by the engine's norms, RoPE and attention, and back by torch's."""

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, H] -> [T, H], of whole sequences."""
        norms = [getattr(self, name) for name in ("q_norm", "k_norm") if hasattr(self, name)]

        def fused(qkv: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            return self.attn(self.prepare(qkv, batch), batch)

        def plain(qkv: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
            query, key, value = self.split_heads(qkv)
            if norms:
                query, key = (
                    functional_call(norm, {"weight": weight}, heads)
                    for norm, weight, heads in zip(norms, weights, (query, key), strict=True)
                )
            query, key = self.rope(batch.positions, query, key)
            return padded_sdpa(query, key, value, batch.query_lens_host, self.head_dim**-0.5)

        attended = with_plain_backward(fused, plain, self.qkv_proj(x), *(norm.weight for norm in norms))
        return self.o_proj(attended.flatten(1))


def batch_of(sequences: Sequence[Sequence[int]], block_size: int, device: torch.device) -> ForwardBatch:
    """Return a step that computes whole sequences, each in blocks of its own, which follow one another in the cache."""
    lengths = [len(seq) for seq in sequences]
    counts = torch.tensor(lengths, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])
    blocks = -(-counts // block_size)
    first_block = blocks.cumsum(0) - blocks
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return ForwardBatch(
        input_ids=torch.tensor([token for seq in sequences for token in seq], device=device),
        positions=positions,
        slot_mapping=first_block.repeat_interleave(counts) * block_size + positions,
        query_start_loc=starts.int(),
        seq_lens=counts.int(),
        block_tables=(first_block[:, None] + torch.arange(int(blocks.max()), device=device)).int(),
        logits_indices=starts[1:] - 1,
        num_seqs=len(lengths),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        query_lens_host=lengths,
        seq_lens_host=lengths,
    )
