"""The runner of one rank: its part of the model, and one draw by all ranks together."""

from __future__ import annotations

from dataclasses import replace

import torch

from folovllm.distributed.group import Group
from folovllm.distributed.sharding import local_config, vocab_shard_size
from folovllm.engine.setup import EngineSetup
from folovllm.models.llama import LlamaForCausalLM
from folovllm.sample.noise import gumbel
from folovllm.sample.sampler import SamplingBatch
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import dummy_items
from folovllm.worker.native_model import load_sharded_model
from folovllm.worker.packed_step import Field

NOWHERE = 2**31 - 1


class ShardedRunner(GraphRunner):
    """A `GraphRunner` whose logits [S, V / size] are of the rank's own part of the vocabulary.

    All ranks run the same steps, and each ends with the same tokens, for all of them draw from the same numbers.
    """

    def __init__(self, setup: EngineSetup, group: Group) -> None:
        """`setup` describes the whole model, but for the device, which is the rank's own."""
        super().__init__(replace(setup, hf_config=local_config(setup.hf_config, group.size)))
        self._whole = setup
        self._group = group
        self._first_id = group.rank * vocab_shard_size(setup.vocab_size, group.size)

    def load_weights(self) -> LlamaForCausalLM:
        """The rank's part, of layers that talk to the others."""
        return load_sharded_model(self._whole, self._group)

    def warmup_model(self) -> None:
        """As on one rank; then the draw over the whole vocabulary, in case that takes more memory."""
        super().warmup_model()
        rows = self._setup.max_num_seqs
        with torch.inference_mode():
            part = torch.zeros(rows, self._setup.vocab_size, dtype=self._setup.dtype, device=self._setup.device)
            seqs = [item.seq for item in dummy_items([1] * rows, self._setup.block_size)]
            self._sampler(self._whole_logits(part), SamplingBatch.from_sequences(seqs, self._setup.device))

    def _draw(self, logits: torch.Tensor, fields: torch.Tensor) -> None:
        """One token a row: each rank finds its own best, and only the bests are exchanged."""
        values, ids = self._own_best(logits, fields)
        mine = torch.stack([values.view(torch.int32), ids])  # [2, S]
        everyone = self._group.all_gather(mine)  # [size, 2, S]
        self._keep(best_of_ranks(everyone[:, 0].view(torch.float32), everyone[:, 1])[1].long(), fields)

    def _own_best(self, logits: torch.Tensor, fields: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Score [S] float32 and token id [S] int32 of the rank's best tokens."""
        temperature = fields[Field.TEMPERATURE].view(torch.float32)
        low, high, positions = fields[Field.SEED_LOW], fields[Field.SEED_HIGH], fields[Field.SEQ_LEN]
        if logits.is_cuda:
            from folovllm.kernels.gumbel_max import tile_bests

            values, ids = tile_bests(logits, temperature, low, high, positions, self._first_id)  # [S, tiles]
            return best_of_ranks(values.T, ids.T)
        seeds = high.long() << 32 | low.long() & 0xFFFFFFFF
        noise = gumbel(seeds, positions.long(), logits.shape[1], self._first_id)
        hot = (temperature > 0)[:, None]
        scores = logits.float() / torch.where(hot, temperature[:, None], 1.0) + noise * hot
        scores = scores.masked_fill(scores.isnan(), -torch.inf)  # NaN is no rank's best, as in the kernel
        return scores.amax(-1), (self._first_id + scores.argmax(-1)).int()

    def _whole_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, V / size] -> [n, V], from all ranks."""
        parts = self._group.all_gather(logits)  # [size, n, V / size]
        return parts.transpose(0, 1).flatten(1)[:, : self._whole.vocab_size]


def best_of_ranks(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The winner among the ranks' best tokens, row by row; of equal scores the one with the lowest id.

    An argmax over a vocabulary in pieces: since each rank sends its best alone, 8 bytes a row cross the wire, not V logits.
    It is part of a recorded step: nothing may wait for a value.

    Args:
        scores: [size, S] float32. ids: [size, S] int32.

    Returns:
        Its score [S] float32 and its id [S] int32.
    """
    best = scores.amax(0)
    return best, torch.where(scores == best, ids, NOWHERE).amin(0)
