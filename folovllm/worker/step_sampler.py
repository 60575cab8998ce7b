"""How a captured step samples: alone, or together with the other ranks that hold a part of the vocabulary each."""

from __future__ import annotations

from typing import Protocol

import torch

from folovllm.distributed.group import Group
from folovllm.distributed.sharding import vocab_shard_size
from folovllm.sample.noise import gumbel
from folovllm.sample.sampler import Sampler, SamplingBatch
from folovllm.step.packed import Field

NOWHERE = 2**31 - 1


class StepSampler(Protocol):
    """The part of a step from logits to tokens, where the vocabulary may be in parts. Device work only: it is recorded."""

    vocab_size: int  # of the whole model

    def one_pass(self, logits: torch.Tensor, fields: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor) -> None:
        """One token a row, with no filters and no penalties, in one pass over the logits [S, V].

        The tokens go to `tokens` [rows] and to their rows' entries of `last` [rows + 1]; `fields` is [len(Field), S].
        """

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the whole vocabulary, [S, V]."""


class LocalSampler:
    """Sampling of a device that has the whole vocabulary."""

    def __init__(self, vocab_size: int, sampler: Sampler, use_kernel: bool) -> None:
        self.vocab_size = vocab_size
        self._sampler = sampler
        self._use_kernel = use_kernel

    def one_pass(self, logits: torch.Tensor, fields: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor) -> None:
        """As `StepSampler`."""
        temperature = fields[Field.TEMPERATURE].view(torch.float32)
        low, high, positions = fields[Field.SEED_LOW], fields[Field.SEED_HIGH], fields[Field.SEQ_LEN]
        if self._use_kernel:
            from folovllm.kernels.gumbel_max import gumbel_max

            gumbel_max(logits, temperature, low, high, positions, out=tokens, keep=(last, fields[Field.ROW]))
            return
        greedy = not logits.is_cuda and not bool(temperature.any())  # to ask a GPU is to wait for it
        batch = SamplingBatch(temperature, seeds_of(fields), positions.long(), greedy)
        keep(self._sampler.sample(logits, batch), fields, tokens, last)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits, which are whole already."""
        return logits


class TensorParallelSampler:
    """Sampling of ranks whose logits [S, V / size] are of their own part of the vocabulary.

    All ranks sample from the same numbers, and so each ends with the same tokens.
    """

    def __init__(self, vocab_size: int, group: Group) -> None:
        self.vocab_size = vocab_size
        self._group = group
        self._first_id = group.rank * vocab_shard_size(vocab_size, group.size)

    def one_pass(self, logits: torch.Tensor, fields: torch.Tensor, tokens: torch.Tensor, last: torch.Tensor) -> None:
        """As `StepSampler`: each rank finds its own best, and only the bests are exchanged."""
        values, ids = self._own_best(logits, fields)
        mine = torch.stack([values.view(torch.int32), ids])  # [2, S]
        everyone = self._group.all_gather(mine)  # [size, 2, S]
        _, best = best_of_ranks(everyone[:, 0].view(torch.float32), everyone[:, 1])
        keep(best.long(), fields, tokens, last)

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Gather the parts of all ranks: [n, V / size] -> [n, V]."""
        parts = self._group.all_gather(logits)  # [size, n, V / size]
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def _own_best(self, logits: torch.Tensor, fields: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Score [S] float32 and token id [S] int32 of the rank's best tokens."""
        temperature = fields[Field.TEMPERATURE].view(torch.float32)
        low, high, positions = fields[Field.SEED_LOW], fields[Field.SEED_HIGH], fields[Field.SEQ_LEN]
        if logits.is_cuda:
            from folovllm.kernels.gumbel_max import tile_bests

            values, ids = tile_bests(logits, temperature, low, high, positions, self._first_id)  # [S, tiles]
            return best_of_ranks(values.T, ids.T)
        noise = gumbel(seeds_of(fields), positions.long(), logits.shape[1], self._first_id)
        hot = (temperature > 0)[:, None]
        scores = logits.float() / torch.where(hot, temperature[:, None], 1.0) + noise * hot
        scores = scores.masked_fill(scores.isnan(), -torch.inf)  # NaN is no rank's best, as in the kernel
        return scores.amax(-1), (self._first_id + scores.argmax(-1)).int()


def seeds_of(fields: torch.Tensor) -> torch.Tensor:
    """The seeds [S] int64 of the rows of `fields` [len(Field), S]."""
    return fields[Field.SEED_HIGH].long() << 32 | fields[Field.SEED_LOW].long() & 0xFFFFFFFF


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
