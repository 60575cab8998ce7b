"""Encodes steps and results as int32 numbers, so that they reach another process without pickling.

Floats and 64-bit numbers are sent as their bits.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from folovllm.model_config import num_experts_of
from folovllm.sampling_row import RowField, SamplingUpdate, line_width
from folovllm.setup import EngineSetup
from folovllm.step.packed import LINES, Field, Int32, PackedStep, Parts, Sample, split
from folovllm.step.sampling_spec import Logprobs
from folovllm.step.schedule import StepResult
from folovllm.step.token_bitmask import TokenBitmasks

STOP: Int32 = np.empty(0, np.int32)  # the last message
HEADER = len(LINES) + 7  # int32 numbers before a step
MASKS = -1  # the first number of masks; a step's is its number of sequences
ASK_LOAD: Int32 = np.array([-2], np.int32)  # a request for the experts' token counts


def encode_step(step: PackedStep) -> Int32:
    """Encode a packed step: a header, then the same buffer that a device receives."""
    sampling_updates, flags = step.sampling_updates, (step.is_special, step.has_memory, step.defers_sampling)
    header = [
        step.num_seqs,
        step.num_decodes,
        sampling_updates.num_rows,
        sampling_updates.num_with_line,
        *flags,
        *step.columns,
    ]
    return step.flatten(header)


def encode_masks(masks: TokenBitmasks) -> Int32:
    """Encode masks as numbers."""
    return np.concatenate([np.array([MASKS, len(masks.rows)], np.int32), masks.rows, masks.bits.ravel()])


def decode_step(message: Int32) -> PackedStep | TokenBitmasks:
    """Decode what `encode_step` or `encode_masks` encoded."""
    if message[0] == MASKS:
        rows, bits = np.split(message[2:], [int(message[1])])
        return TokenBitmasks(rows, bits.reshape(len(rows), -1))
    num_seqs, num_decodes, num_rows, num_with_line, *rest = message[:HEADER].tolist()
    parts = split(message[HEADER:], Parts(*rest[3:]))
    sampling_updates = SamplingUpdate(parts.sampling_updates, num_rows, num_with_line)
    return PackedStep(
        parts.fields, num_seqs, num_decodes, parts.tokens, parts.updates, parts.samples, sampling_updates, parts.scores,
        parts.logprobs, *map(bool, rest[:3]),
    )  # fmt: skip


def encode_result(result: StepResult) -> Int32:
    """Encode how many tokens were sampled for each sequence, the tokens, and log-probabilities where there are any."""
    counts = [len(tokens) for tokens in result.token_ids]
    parts = [np.array([len(counts), *counts, *chain.from_iterable(result.token_ids)], np.int32)]
    for index, rows in result.logprobs.items():
        for row in rows:
            ids, values, ranks = zip(*row, strict=True)
            parts += [np.array([index, len(row), *ids, *ranks], np.int32), np.array(values, np.float32).view(np.int32)]
    return np.concatenate(parts)


def decode_result(message: Int32) -> StepResult:
    """Decode what `encode_result` encoded."""
    parts = _Reader(message)
    counts = parts.take(int(parts.take(1)[0])).tolist()
    tokens = [parts.take(count).tolist() for count in counts]
    logprobs: dict[int, list[Logprobs]] = {}
    while parts.left:
        index, count = parts.take(2).tolist()
        ids, ranks, values = parts.take(count).tolist(), parts.take(count).tolist(), parts.take(count).view(np.float32)
        logprobs.setdefault(index, []).append(list(zip(ids, values.tolist(), ranks, strict=True)))
    return StepResult(tokens, logprobs)


def load_as_result(load: list[list[int]]) -> StepResult:
    """Return the token counts of experts [L][E] as a result: the tokens of sequence l are layer l's 64-bit counts."""
    return StepResult(np.array(load, np.int64).view(np.int32).tolist(), {})


def result_as_load(result: StepResult) -> list[list[int]]:
    """Return the token counts of experts [L][E] that `load_as_result` stored in a result."""
    return np.array(result.token_ids, np.int32).view(np.int64).tolist()


def longest_messages(setup: EngineSetup) -> tuple[int, int]:
    """Return the largest number of int32 numbers in a step and in a result. Unused memory of a ring is never allocated."""
    rows, tokens, vocab_size = setup.max_num_seqs, setup.max_num_batched_tokens, setup.vocab_size
    blocks = -(-setup.max_model_len // setup.block_size)
    samples = rows + tokens  # at most: one a sequence, or with drafts one a token
    per_row = len(Field) + 3 * blocks + 1 + len(RowField) + 3 * line_width(vocab_size)
    per_score = 2 + 3 * (1 + min(setup.config.max_logprobs, vocab_size))
    load = 1 + setup.hf_config.num_hidden_layers * (1 + 2 * num_experts_of(setup.hf_config))
    result = 1 + rows * (4 + 3 * (vocab_size + 1)) + per_score * tokens
    return HEADER + rows * per_row + 5 * tokens + (len(Sample) + 2) * samples, max(result, load)


class _Reader:
    """Reads a message from front to back."""

    def __init__(self, message: Int32) -> None:
        self._message = message
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._message) - self._at

    def take(self, count: int) -> npt.NDArray[np.int32]:
        self._at += count
        return self._message[self._at - count : self._at]
