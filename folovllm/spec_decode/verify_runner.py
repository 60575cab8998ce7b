"""A `ModelRunner` whose shares may draw several tokens, to check guesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from folovllm.forward_batch import ForwardBatch
from folovllm.spec_decode.verify import most_draws
from folovllm.step.draw import Logprobs
from folovllm.step.packed import Int32, Sample, fields_of, sample_levels, samples_of
from folovllm.step.schedule import SchedulerOutput, Share, StepResult
from folovllm.worker.model_runner import ModelRunner


class VerifyingModelRunner(ModelRunner):
    """Computes logits after all guesses of a share at once, then draws one level after the other.

    The second tokens of all shares are drawn when the first are known, and only where these were guessed, and so on. So
    penalties, bad words and masks see at each draw just the tokens that the answer has by then, and nothing is taken back.
    """

    def _build(self, shares: Sequence[Share]) -> ForwardBatch:
        for share in shares:  # a table may have been cut back
            del self._input_batch.block_tables.get(share.row, [])[share.first_new_block :]
        batch = super()._build(shares)
        after = torch.from_numpy(samples_of_shares(shares)[Sample.AFTER])
        batch.logits_indices = after.to(batch.input_ids.device, torch.int64)
        return batch

    def _most_draws(self) -> int:
        return most_draws(self._setup.max_num_seqs) + self._setup.max_num_seqs

    def _draw(self, output: SchedulerOutput, logits: torch.Tensor, scores: dict[int, list[Logprobs]]) -> StepResult:
        """As many tokens for each share as its guesses allow, from `logits` [R, V] of all draws."""
        shares, samples = output.shares, samples_of_shares(output.shares)
        sequence, position, draft = samples[[Sample.SEQUENCE, Sample.POSITION, Sample.DRAFT]].tolist()
        drawn: list[list[int]] = [[] for _ in shares]
        logprobs = dict(scores)
        right = [True] * len(shares)  # whether all guesses so far were
        for level, every in enumerate(sample_levels(samples)):
            at = [r for r in every.tolist() if right[sequence[r]] and samples[Sample.COUNTS, r]]
            if not at:
                break
            self._draws.set_masks(None if output.masks is None else output.masks.of_level(level))
            found = self._draws.draw(logits[at], [shares[sequence[r]].row for r in at], [position[r] for r in at])
            for r, token, row in zip(at, found.token_ids, found.logprobs, strict=True):
                i = sequence[r]
                drawn[i].append(token)
                right[i] = token == draft[r]
                if row is not None:
                    logprobs.setdefault(i, []).append(row)
        return StepResult(drawn, logprobs)


def samples_of_shares(shares: Sequence[Share]) -> Int32:
    """The samples [len(Sample), R] of shares that bring all their tokens."""
    return samples_of(fields_of(shares), np.concatenate([share.token_ids for share in shares]))
