"""Steps over dummy sequences: the largest one for the memory profile, and small ones of every kind to compile their kernels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from folovllm.engine.setup import EngineSetup
from folovllm.models.model_config import num_experts_of
from folovllm.step.schedule import SamplingSpec, ScheduledSequence, SchedulerOutput

WARM_UP_TOKENS = 256  # more tokens or sequences than this change no kernel of a plain model
LONG_STEP = 4096  # from here on attention may have another kernel, for long prompts
FILTERED = SamplingSpec(top_p=0.9)


def small_steps(setup: EngineSetup) -> Iterator[SchedulerOutput]:
    """Yield small steps of every kind. After them no kernel is compiled while requests wait.

    The variant of a kernel may depend on the number of tokens or of decodes: by limits, and by powers of two. It never depends
    on which blocks are used. So there are prompts of 1, 2, 4, ... tokens and a long one, then as many decodes, and decodes
    beside a prompt. The last kind samples without filters, the others with one. No request reads what they write to the
    cache. Products of experts and of quantized weights have other tiles for more tokens, up to the largest step.
    """
    longest = min(setup.max_model_len, setup.max_num_batched_tokens, WARM_UP_TOKENS)
    most = min(setup.max_num_seqs, WARM_UP_TOKENS)
    long = [long_prompts(setup)] if setup.attention.long_prompts else []
    if num_experts_of(setup.hf_config) or getattr(setup.hf_config, "quantization_config", None):
        sizes = doublings(setup.max_num_batched_tokens)
        long += [long_prompts(setup, tokens) for tokens in sizes if tokens > longest]
    for lengths in long + [[n] for n in doublings(longest)] + [[1] * n for n in doublings(most)]:
        yield SchedulerOutput(dummy_seqs(lengths, setup.block_size))
    for n in doublings(most):
        yield SchedulerOutput(dummy_seqs([*[1] * (n - 1), min(2, longest)], setup.block_size, SamplingSpec()))


def long_prompts(setup: EngineSetup, tokens: int = LONG_STEP) -> list[int]:
    """Return the prompt lengths of a step of `tokens` tokens, or of the largest possible step. Prompts are as long as possible."""
    total = min(tokens, setup.max_num_batched_tokens, setup.max_num_seqs * setup.max_model_len)
    longest = min(total, setup.max_model_len)
    return [longest] * (total // longest) + ([total % longest] if total % longest else [])


def doublings(limit: int) -> list[int]:
    """Return 1, 2, 4, ... below `limit`, and `limit`."""
    return [1 << i for i in range((limit - 1).bit_length())] + [limit]


def dummy_seqs(lengths: list[int], block_size: int, sampling: SamplingSpec = FILTERED) -> tuple[ScheduledSequence, ...]:
    """Return dummy sequences that all use the same first blocks."""
    return tuple(
        ScheduledSequence(
            seq_id=-1,
            row=row,
            start=0,
            end=length,
            token_ids=np.zeros(length, np.int32),
            new_blocks=tuple(range(-(-length // block_size))),
            first_new_block=0,
            num_samples=1,
            sampling=sampling,
        )
        for row, length in enumerate(lengths)
    )
