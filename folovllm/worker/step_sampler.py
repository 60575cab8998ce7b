"""Sampling in a captured step: on one device, or over several ranks that each hold a part of the vocabulary."""

from __future__ import annotations

import torch

from folovllm.distributed.group import ProcessGroup
from folovllm.distributed.sharding import vocab_shard_size
from folovllm.sample.noise import gumbel
from folovllm.sample.sampler import Sampler, SamplingBatch
from folovllm.sample.sampler_state import seeds_of
from folovllm.step.packed import Field

NOWHERE = 2**31 - 1


class LocalSampler:
    """The sampler of a device that has the whole vocabulary. Device work only, as in `TensorParallelSampler`."""

    def __init__(self, sampler: Sampler, use_kernel: bool) -> None:
        self._sampler = sampler
        self._use_kernel = use_kernel

    def one_pass(self, logits: torch.Tensor, fields: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor) -> None:
        """Sample one token a row with no filters and no penalties, in one pass over the logits [S, V].

        It writes the tokens to `tokens` [rows] and to their rows' entries of `last` [rows + 1]. `fields` is [len(Field), S].
        """
        temperature = fields[Field.TEMPERATURE].view(torch.float32)
        low, high, positions = fields[Field.SEED_LOW], fields[Field.SEED_HIGH], fields[Field.SEQ_LEN]
        if self._use_kernel:
            from folovllm.kernels.gumbel_max import gumbel_max

            gumbel_max(logits, temperature, low, high, positions, out=tokens, keep=(last, fields[Field.ROW]))
            return
        greedy = not logits.is_cuda and not bool(temperature.any())  # on a GPU the host would wait for this value
        batch = SamplingBatch(temperature, seeds_of(low, high), positions.long(), greedy)
        keep(self._sampler.sample(logits, batch), fields, tokens, last)

    def full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return `logits`, which are over the whole vocabulary already."""
        return logits


class TensorParallelSampler:
    """The sampler of ranks whose logits [S, V / size] cover their own part of the vocabulary.

    All ranks compare the same numbers, so they get the same tokens.
    """

    def __init__(self, vocab_size: int, group: ProcessGroup) -> None:
        self.vocab_size = vocab_size
        self._group = group
        self._first_id = group.rank * vocab_shard_size(vocab_size, group.size)

    def one_pass(self, logits: torch.Tensor, fields: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor) -> None:
        """Each rank finds its best token of a row, and only these are exchanged."""
        values, ids = self._own_best(logits, fields)
        mine = torch.stack([values.view(torch.int32), ids])  # [2, S]
        everyone = self._group.all_gather(mine)  # [size, 2, S]
        _, best = best_of_ranks(everyone[:, 0].view(torch.float32), everyone[:, 1])
        keep(best.long(), fields, tokens, last)

    def full_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the parts of all ranks: [n, V / size] -> [n, V]."""
        parts = self._group.all_gather(logits)  # [size, n, V / size]
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def _own_best(self, logits: torch.Tensor, fields: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the score [S] float32 and the token id [S] int32 of the rank's best token in each row."""
        temperature = fields[Field.TEMPERATURE].view(torch.float32)
        low, high, positions = fields[Field.SEED_LOW], fields[Field.SEED_HIGH], fields[Field.SEQ_LEN]
        if logits.is_cuda:
            from folovllm.kernels.gumbel_max import tile_bests

            values, ids = tile_bests(logits, temperature, low, high, positions, self._first_id)  # [S, tiles]
            return best_of_ranks(values.T, ids.T)
        noise = gumbel(seeds_of(low, high), positions.long(), logits.shape[1], self._first_id)
        hot = (temperature > 0)[:, None]
        scores = logits.float() / torch.where(hot, temperature[:, None], 1.0) + noise * hot
        scores = scores.masked_fill(scores.isnan(), -torch.inf)  # NaN is no rank's best, as in the kernel
        return scores.amax(-1), (self._first_id + scores.argmax(-1)).int()


StepSampler = LocalSampler | TensorParallelSampler  # turns logits into tokens in a captured step


def keep(sampled: torch.Tensor, fields: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor) -> None:
    """Write the sampled tokens [S] to `tokens`, and to their rows' entries of `last`."""
    tokens[: len(sampled)] = sampled
    last[fields[Field.ROW].long()] = sampled


def best_of_ranks(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The winner among the ranks' best tokens, row by row; of equal scores the one with the lowest id.

    An argmax over a vocabulary in pieces: since each rank sends its best alone, 8 bytes a row cross the wire, not V logits.
    It is part of a captured step: nothing may wait for a value.

    Args:
        scores: [size, S] float32. ids: [size, S] int32.

    Returns:
        Its score [S] float32 and its id [S] int32.
    """
    best = scores.amax(0)
    return best, torch.where(scores == best, ids, NOWHERE).amin(0)
