"""Steps and results as int32 numbers, so that they can cross to another process without being pickled.

Floats and 64-bit numbers travel as their bits.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from folovllm.setup import EngineSetup
from folovllm.step.draw import DrawSpec, Logprobs
from folovllm.step.packed import Field, Int32, PackedStep
from folovllm.step.schedule import StepResult

STOP: Int32 = np.empty(0, np.int32)  # the last message of all
HEADER = 6  # int32 numbers before a step
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTS = ("seed", "top_k", "first_end", "num_prompt_tokens")


def encode_step(step: PackedStep) -> Int32:
    """A packed step."""
    tokens, updates = len(step.tokens), step.updates.shape[1]
    numbers = [step.num_seqs, step.num_decodes, step.fields.shape[1], tokens, updates, len(step.new_rows)]
    rows = [encode_draw(row, draw) for row, draw in step.new_rows.items()]
    return np.concatenate([np.array(numbers, np.int32), step.flatten(), *rows])


def decode_step(message: Int32) -> PackedStep:
    """The step that went into `encode_step`."""
    num_seqs, num_decodes, width, num_tokens, num_updates, num_new_rows = message[:HEADER].tolist()
    parts = _Reader(message[HEADER:])
    fields = parts.take(len(Field) * width).reshape(len(Field), width)
    tokens, updates = parts.take(num_tokens), parts.take(3 * num_updates).reshape(3, num_updates)
    return PackedStep(
        fields, num_seqs, num_decodes, tokens, updates, dict(decode_draw(parts) for _ in range(num_new_rows))
    )


def encode_draw(row: int, draw: DrawSpec) -> Int32:
    """How the tokens of a new row are drawn."""
    floats = np.array([getattr(draw, name) for name in FLOATS], np.float64)
    ints = [getattr(draw, name) for name in INTS]
    ints += [-1 if draw.logprobs is None else draw.logprobs, len(draw.forbidden), len(draw.history)]
    numbers = floats.view(np.int32), np.array(ints, np.int64).view(np.int32)
    return np.concatenate([np.array([row], np.int32), *numbers, np.array(draw.forbidden, np.int32), draw.history])


def decode_draw(parts: _Reader) -> tuple[int, DrawSpec]:
    """What went into `encode_draw`."""
    row = int(parts.take(1)[0])
    floats = dict(zip(FLOATS, parts.take(2 * len(FLOATS)).view(np.float64).tolist(), strict=True))
    *ints, logprobs, num_forbidden, num_history = parts.take(2 * (len(INTS) + 3)).view(np.int64).tolist()
    return row, DrawSpec(
        logprobs=None if logprobs < 0 else logprobs,
        forbidden=tuple(parts.take(num_forbidden).tolist()),
        history=parts.take(num_history),
        **floats,
        **dict(zip(INTS, ints, strict=True)),
    )


def encode_result(result: StepResult) -> Int32:
    """How many tokens each share drew, the tokens, and log-probabilities where there are any."""
    counts = [len(tokens) for tokens in result.token_ids]
    parts = [np.array([len(counts), *counts, *chain.from_iterable(result.token_ids)], np.int32)]
    for index, rows in enumerate(result.logprobs):
        for row in rows:
            ids, values, ranks = zip(*row, strict=True)
            parts += [np.array([index, len(row), *ids, *ranks], np.int32), np.array(values, np.float32).view(np.int32)]
    return np.concatenate(parts)


def decode_result(message: Int32) -> StepResult:
    """What went into `encode_result`."""
    parts = _Reader(message)
    counts = parts.take(int(parts.take(1)[0])).tolist()
    tokens = [parts.take(count).tolist() for count in counts]
    logprobs: list[list[Logprobs]] = [[] for _ in tokens]
    while parts.left:
        index, count = parts.take(2).tolist()
        ids, ranks, values = parts.take(count).tolist(), parts.take(count).tolist(), parts.take(count).view(np.float32)
        logprobs[index].append(list(zip(ids, values.tolist(), ranks, strict=True)))
    return StepResult(tokens, logprobs)


def longest_messages(setup: EngineSetup) -> tuple[int, int]:
    """How many numbers a step and a result can have. Far more than they usually do; memory is taken as it is used."""
    rows, vocab_size = setup.max_num_seqs, setup.vocab_size
    pages = -(-setup.max_model_len // setup.block_size)
    per_row = len(Field) + 3 * pages + 1 + 2 * (len(FLOATS) + len(INTS) + 3) + vocab_size + setup.max_model_len
    return HEADER + rows * per_row + setup.max_num_batched_tokens, 1 + rows * (4 + 3 * (vocab_size + 1))


class _Reader:
    """Takes a message apart from the front."""

    def __init__(self, message: Int32) -> None:
        self._message = message
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._message) - self._at

    def take(self, count: int) -> npt.NDArray[np.int32]:
        self._at += count
        return self._message[self._at - count : self._at]
