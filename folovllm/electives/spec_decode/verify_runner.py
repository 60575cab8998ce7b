"""A `ModelRunner` whose scheduled sequences may sample several tokens, to verify drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from folovllm.electives.spec_decode.verify import max_samples
from folovllm.step.bitmasks import MASKS, TokenBitmasks
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.packed import Sample, fields_of, sample_levels, samples_of
from folovllm.step.schedule import Int32, Logprobs, ScheduledSequence, SchedulerOutput, StepResult
from folovllm.worker.model_runner import ModelRunner


class VerifyingModelRunner(ModelRunner):
    """Computes the logits behind all draft tokens at once, then samples one level after the other.

    The second tokens of all sequences are sampled when the first are known, and only where the first draft token was accepted;
    and so on. So penalties, bad words and masks see at each sample the tokens that the answer has by then, and nothing is undone.
    """

    def _build(self, scheduled_seqs: Sequence[ScheduledSequence]) -> ForwardBatch:
        for scheduled in scheduled_seqs:  # a table may have been cut back
            del self._input_batch.block_tables.get(scheduled.row, [])[scheduled.first_new_block :]
        batch = super()._build(scheduled_seqs)
        after = torch.from_numpy(samples_of_seqs(scheduled_seqs)[Sample.AFTER])
        batch.logits_indices = after.to(batch.input_ids.device, torch.int64)
        return batch

    def _max_samples(self) -> int:
        return max_samples(self._setup.max_num_seqs) + self._setup.max_num_seqs

    def _sample(self, output: SchedulerOutput, logits: torch.Tensor, scores: dict[int, list[Logprobs]]) -> StepResult:
        """Return for each scheduled sequence its accepted tokens and one more, from `logits` [R, V] of all samples."""
        scheduled_seqs, samples = output.scheduled_seqs, samples_of_seqs(output.scheduled_seqs)
        sequence, position, draft = samples[[Sample.SEQUENCE, Sample.POSITION, Sample.DRAFT]].tolist()
        sampled: list[list[int]] = [[] for _ in scheduled_seqs]
        logprobs = dict(scores)
        accepted = [True] * len(scheduled_seqs)  # whether all draft tokens so far were
        masks, step_rows = None, [scheduled.row for scheduled in scheduled_seqs]
        if output.extras is not None and MASKS in output.extras:
            masks = TokenBitmasks.from_index(output.extras[MASKS], step_rows).of_samples(samples[Sample.ROW])
        for every in sample_levels(samples):
            at = [r for r in every.tolist() if accepted[sequence[r]] and samples[Sample.COUNTS, r]]
            if not at:
                break
            rows, ends = [step_rows[sequence[r]] for r in at], [position[r] for r in at]
            own = None if masks is None else {MASKS: np.column_stack([np.arange(len(at), dtype=np.int32), masks[at]])}
            found = self._sampling_rows.sample(logits[at], rows, ends, extras=own)
            for r, token, row in zip(at, found.token_ids, found.logprobs, strict=True):
                i = sequence[r]
                sampled[i].append(token)
                accepted[i] = token == draft[r]
                if row is not None:
                    logprobs.setdefault(i, []).append(row)
        return StepResult(sampled, logprobs)


def samples_of_seqs(scheduled_seqs: Sequence[ScheduledSequence]) -> Int32:
    """Return the samples [len(Sample), R] of scheduled sequences that bring all their tokens."""
    return samples_of(fields_of(scheduled_seqs), np.concatenate([scheduled.token_ids for scheduled in scheduled_seqs]))
