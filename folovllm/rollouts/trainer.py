"""The engine's model under autograd: log-probabilities that equal the engine's bit by bit, and have gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from folovllm.forward_batch import ForwardBatch
from folovllm.layers.layer_set import LayerSet
from folovllm.llm import LLM
from folovllm.models.loader import load_model
from folovllm.models.registry import build_model
from folovllm.rollouts.attention import TrainingBackend
from folovllm.rollouts.layers import invariant_layers
from folovllm.rollouts.weights import weights_of
from folovllm.worker.native_model import attention_layers


class Policy:
    """A model to train: a copy of an engine's, built from the layers of `batch_invariant=True`, in the engine's dtype.

    Attributes:
        model: its parameters are those of an optimizer.
    """

    def __init__(self, llm: LLM, layers: LayerSet | None = None) -> None:
        """`layers`: others than the engine's, to compare with. Raises ValueError as `LLM.get_weights` does."""
        setup = llm.engine.setup
        layers = invariant_layers() if layers is None else layers
        self.device = setup.device
        self.model = build_model(setup.hf_config, setup.dtype, setup.device, setup.max_model_len, layers)
        load_model(self.model, llm.get_weights().items(), use_tqdm=False)
        self.model.requires_grad_(True)
        self._backend = TrainingBackend(replace(setup.attention, block_size=1))
        for attention in attention_layers(self.model):
            attention.bind(self._backend)
            attention.kv_cache = torch.empty(0)  # the backend takes K/V of the step

    def logprobs(self, sequences: Sequence[Sequence[int]], num_prompt_tokens: Sequence[int]) -> list[torch.Tensor]:
        """Return the log-probabilities of each sequence's tokens behind its prompt, under the model's own distribution.

        Without autograd, or with it, they are the same bits; and those that the engine reports for `logprobs=0`.

        Args:
            sequences: token ids of prompt and answer. num_prompt_tokens: how many are the prompt, at least 1.

        Returns:
            For each sequence a tensor [number of answer tokens], float32.
        """
        batch = batch_of(sequences, self.device)
        starts = batch.query_start_loc.tolist()
        answers = [
            range(start + p, start + len(seq))
            for start, p, seq in zip(starts[:-1], num_prompt_tokens, sequences, strict=True)
        ]
        at = torch.tensor([i for answer in answers for i in answer], device=self.device)
        self._backend.plan(batch)
        logits = self.model.compute_logits(self.model(batch), replace(batch, logits_indices=at - 1))
        found = logits.float().log_softmax(-1).gather(1, batch.input_ids[at][:, None])[:, 0]
        return list(found.split([len(answer) for answer in answers]))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by the checkpoint's names, as `LLM.update_weights` takes them. They are views, not copies."""
        return weights_of(self.model)


def batch_of(sequences: Sequence[Sequence[int]], device: torch.device) -> ForwardBatch:
    """Return a step that computes whole sequences, of which token t is in slot t of blocks of one token."""
    lengths = [len(seq) for seq in sequences]
    counts = torch.tensor(lengths, device=device)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    total = torch.arange(sum(lengths), device=device)
    return ForwardBatch(
        input_ids=torch.tensor([token for seq in sequences for token in seq], device=device),
        positions=torch.cat([torch.arange(length, device=device) for length in lengths]),
        slot_mapping=total,
        query_start_loc=starts.int(),
        seq_lens=counts.int(),
        block_tables=(starts[:-1, None] + torch.arange(max(lengths), device=device)).int(),
        logits_indices=starts[1:] - 1,
        num_seqs=len(lengths),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        query_lens_host=lengths,
        seq_lens_host=lengths,
    )
