"""Steps and results as int32 numbers, so that they can cross to another process without being pickled.

Floats and 64-bit numbers travel as their bits.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.setup import EngineSetup
from folovllm.request import Sequence
from folovllm.sample.sampler import Logprobs, SamplerOutput
from folovllm.sampling_params import SamplingParams
from folovllm.worker.packed_step import Field, Int32, PackedStep

STOP: Int32 = np.empty(0, np.int32)  # the last message of all
HEADER = 6  # int32 numbers before a step
FLOATS, INTS = 6, 9  # 64-bit numbers of a sequence that takes the full path


def encode_step(step: PackedStep, full: dict[int, Sequence]) -> Int32:
    """A packed step, and what the sampler must know of the sequences in `full` (by index in the step)."""
    tokens, updates = len(step.tokens), step.updates.shape[1]
    header = np.array([step.num_seqs, step.num_decodes, step.fields.shape[1], tokens, updates, len(full)], np.int32)
    return np.concatenate([header, step.flatten(), *(encode_sequence(index, seq) for index, seq in full.items())])


def decode_step(message: Int32) -> tuple[PackedStep, dict[int, Sequence]]:
    """The step and the sequences that went into `encode_step`; of these, what a draw needs."""
    num_seqs, num_decodes, width, num_tokens, num_updates, num_full = message[:HEADER].tolist()
    parts = _Reader(message[HEADER:])
    fields = parts.take(len(Field) * width).reshape(len(Field), width)
    tokens, updates = parts.take(num_tokens), parts.take(3 * num_updates).reshape(3, num_updates)
    full = dict(decode_sequence(parts) for _ in range(num_full))
    return PackedStep(fields, num_seqs, num_decodes, tokens, updates), full


def encode_sequence(index: int, seq: Sequence) -> Int32:
    """What a draw with filters and penalties looks at. The tokens so far go along only where penalties count them."""
    p = seq.params
    history = seq.token_ids if p.has_penalties else seq.token_ids[:0]
    too_short = seq.num_output_tokens + seq.num_in_flight < p.min_tokens
    forbidden = sorted({*seq.eos_token_ids, *p.stop_token_ids}) if too_short else []
    floats = [p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty]
    ints = [seq.seed, seq.num_prompt_tokens, seq.num_tokens, seq.num_in_flight, p.top_k, p.min_tokens]
    ints += [-1 if p.logprobs is None else p.logprobs, len(forbidden), len(history)]
    numbers = [np.array(floats, np.float64).view(np.int32), np.array(ints, np.int64).view(np.int32)]
    return np.concatenate([np.array([index], np.int32), *numbers, np.array(forbidden, np.int32), history])


def decode_sequence(parts: _Reader) -> tuple[int, Sequence]:
    """Index and sequence; a light one: whatever is not needed for a draw is missing."""
    index = int(parts.take(1)[0])
    temperature, top_p, min_p, *penalties = parts.take(2 * FLOATS).view(np.float64).tolist()
    ints = parts.take(2 * INTS).view(np.int64).tolist()
    seed, num_prompt_tokens, num_tokens, num_in_flight, top_k, min_tokens, logprobs, num_forbidden, num_history = ints
    params = SamplingParams(
        temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, min_tokens=min_tokens, max_tokens=None,
        logprobs=None if logprobs < 0 else logprobs, repetition_penalty=penalties[0], presence_penalty=penalties[1],
        frequency_penalty=penalties[2],
    )  # fmt: skip
    forbidden, history = parts.take(num_forbidden), parts.take(num_history)
    seq = Sequence("", [], params, 0, seed, _NO_TEXT, eos_token_ids=frozenset(forbidden.tolist()))
    seq.prompt_token_ids = cast(Any, range(num_prompt_tokens))  # only its length is asked for
    seq.num_tokens, seq.num_in_flight, seq._token_ids = num_tokens, num_in_flight, history
    return index, seq


def encode_result(result: SamplerOutput) -> Int32:
    """Token ids, and log-probabilities where there are any."""
    parts = [np.array([len(result.token_ids), *result.token_ids], np.int32)]
    for index, row in enumerate(result.logprobs):
        if row is not None:
            ids, values, ranks = zip(*row, strict=True)
            parts += [np.array([index, len(row), *ids, *ranks], np.int32), np.array(values, np.float32).view(np.int32)]
    return np.concatenate(parts)


def decode_result(message: Int32) -> SamplerOutput:
    """What went into `encode_result`."""
    parts = _Reader(message)
    tokens = parts.take(int(parts.take(1)[0])).tolist()
    logprobs: list[Logprobs | None] = [None] * len(tokens)
    while parts.left:
        index, count = parts.take(2).tolist()
        ids, ranks, values = parts.take(count).tolist(), parts.take(count).tolist(), parts.take(count).view(np.float32)
        logprobs[index] = list(zip(ids, values.tolist(), ranks, strict=True))
    return SamplerOutput(tokens, logprobs)


def longest_messages(setup: EngineSetup) -> tuple[int, int]:
    """How many numbers a step and a result can have. Far more than they usually do; memory is taken as it is used."""
    rows, vocab_size = setup.max_num_seqs, setup.vocab_size
    pages = -(-setup.max_model_len // setup.block_size)
    per_row = len(Field) + 3 * pages + 1 + 2 * (FLOATS + INTS) + vocab_size + setup.max_model_len
    return HEADER + rows * per_row + setup.max_num_batched_tokens, 1 + rows * (3 + 3 * (vocab_size + 1))


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


_NO_TEXT = IncrementalDetokenizer(str)
