"""Padded shapes for captured steps with drafts, and small steps that compile their kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from folovllm.engine.setup import EngineSetup
from folovllm.sample.sampling_row import mask_width
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.packed import PackedStep, StepPacker
from folovllm.step.schedule import SamplingSpec, SchedulerOutput
from folovllm.worker.buckets import Bucket
from folovllm.worker.warm_up import FILTERED, doublings, dummy_seqs

DRAFT_TOKENS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def draft_bucket(num_tokens: int) -> Bucket:
    """Return the bucket for steps with drafts: up to `num_tokens` tokens, and as many sequences and samples."""
    return Bucket(num_tokens, 0, num_tokens + 1, num_tokens, num_tokens)


def draft_buckets(num_samples: int) -> list[Bucket]:
    """Return the buckets for steps with drafts of up to `num_samples` samples, small ones first."""
    last = min(num_samples, DRAFT_TOKENS[-1])
    return [draft_bucket(n) for n in (*[n for n in DRAFT_TOKENS if n < last], last)]


def steps_with_drafts(setup: EngineSetup, num_samples: int) -> Iterator[SchedulerOutput]:
    """Yield small steps that sample 2, 4, 8, ... tokens of a sequence, up to `num_samples`: with a filter, and without."""
    for n in doublings(min(setup.max_model_len, setup.max_num_batched_tokens, num_samples))[1:]:
        for sampling in FILTERED, SamplingSpec():
            (scheduled,) = dummy_seqs([n], setup.block_size, sampling)
            yield SchedulerOutput((scheduled._replace(num_samples=n),))


def late_draft(setup: EngineSetup) -> tuple[PackedStep, TokenBitmasks]:
    """Return a step with a draft and deferred sampling, and the masks with which it samples."""
    (scheduled,) = dummy_seqs([2], setup.block_size, SamplingSpec(has_grammar=True))
    step = StepPacker(setup.max_num_seqs, []).pack(SchedulerOutput((scheduled._replace(num_samples=2),)))
    step.defers_sampling = True
    return step, TokenBitmasks(np.zeros(2, np.int32), np.full((2, mask_width(setup.vocab_size)), -1, np.int32))
