"""The sampling state of a row on the device: its fields, and a line with its bad words and one word for each token id.

All numbers are int32, so one buffer brings the updates of all rows. This file is the host's side: the layout, and the code that
writes it. `folovllm/sample/sampler_state.py` is the device's side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from folovllm.step.schedule import Int32, SamplingSpec, TokenIds


class RowField(IntEnum):
    """Fields of a row. Floats are stored as the bits of int32 numbers, a seed as two int32 numbers."""

    FLAGS = 0  # FILTERS, MASK, WORDS, ONLY_ALLOWED, COUNTED, BAD_WORDS
    TEMPERATURE = 1  # float32; 0 is greedy
    SEED_LOW = 2
    SEED_HIGH = 3
    TOP_K = 4  # 0: off
    TOP_P = 5  # float32; 1: off
    MIN_P = 6  # float32; 0: off
    REPETITION = 7  # float32; 1: off
    PRESENCE = 8  # float32; 0: off
    FREQUENCY = 9  # float32; 0: off
    FREE_FROM = 10  # position from which the tokens that may end the answer are allowed


FILTERS = 1  # the row is not greedy, and samples with top_k, top_p or min_p
MASK = 2  # a token bitmask says which tokens may be sampled
WORDS = 4  # the row's logits depend on its words; only then its line is read
ONLY_ALLOWED = 8  # only tokens whose word has ALLOWED may be sampled
COUNTED = 16  # a penalty reads the counts of sampled tokens
BAD_WORDS = 32  # the row has bad words
MEMORY = COUNTED | BAD_WORDS  # the row's logits depend on the tokens that were sampled before

# A word: the token's count in the answer, four bits, and a bias on its logit as the bits of a float16.
COUNT = (1 << 12) - 1  # the largest count: a count stays there
ENDS = 1 << 12  # forbidden before FREE_FROM
IN_PROMPT = 1 << 13
ALLOWED = 1 << 14
COMPLETES = 1 << 15  # forbidden: it would complete a bad word
BIAS_SHIFT = 16

# A row's line: its bad words, the newest tokens of its answer, and the words.
MAX_BAD_WORDS, MAX_BAD_TOKENS = 128, 1024  # of a row: bad words, and the tokens of all of them
BAD_ENDS_AT = 0  # [MAX_BAD_WORDS]: where each bad word ends in the list of their tokens; 0 after the last
BAD_TOKENS_AT = BAD_ENDS_AT + MAX_BAD_WORDS  # [MAX_BAD_TOKENS]: the bad words end to end
RECENT = MAX_BAD_TOKENS  # newest tokens of the answer that are kept
RECENT_AT = BAD_TOKENS_AT + MAX_BAD_TOKENS  # [RECENT]: token id + 1 at its position % RECENT; 0: none
WORDS_AT = RECENT_AT + RECENT  # [V]: the words, by token id
ALIGNED = 64  # columns: lines are aligned for the GPU's reads

BITS = 32  # of a number in a token bitmask: bit t % 32 of number t // 32 is token t's


def mask_width(vocab_size: int) -> int:
    """Return how many int32 numbers hold a bit for each token."""
    return -(-vocab_size // BITS)


def line_width(vocab_size: int) -> int:
    """Return the number of columns of a row's line."""
    return -(-(WORDS_AT + vocab_size) // ALIGNED) * ALIGNED


@dataclass(slots=True, frozen=True)
class SamplingUpdate:
    """The whole sampling state of some rows as one buffer: `SamplerState.set_rows(buffer on the device, num_rows, num_with_line)`.

    A row is updated when a sequence gets it, also after a preemption.
    """

    buffer: Int32  # [num_rows, 1 + len(RowField)]: rows and their fields; then [3, E]: entries of row, column, value
    num_rows: int
    num_with_line: int  # rows whose line is replaced come first: by the entries, and by 0 in all other columns

    @property
    def fields(self) -> Int32:
        """Each row and its fields, [num_rows, 1 + len(RowField)]."""
        return self.buffer[: self.num_rows * (1 + len(RowField))].reshape(self.num_rows, -1)


def pack_rows(specs: Mapping[int, SamplingSpec]) -> SamplingUpdate:
    """Return the sampling state of rows [row: spec] that have a new sequence."""
    ordered = sorted(specs, key=lambda row: not specs[row].has_words)
    fields = [np.concatenate([np.array([row], np.int32), row_fields(specs[row])]) for row in ordered]
    lines = {row: row_line(specs[row]) for row in ordered if specs[row].has_words}
    entries = [np.stack([np.full(len(columns), row), columns, values]) for row, (columns, values) in lines.items()]
    parts = [*fields, np.concatenate([np.empty((3, 0), np.int32), *entries], axis=1).ravel()]
    return SamplingUpdate(np.concatenate(parts).astype(np.int32), len(ordered), len(lines))


def flags_of(spec: SamplingSpec) -> int:
    """Return the FLAGS of a row."""
    has_filters = not spec.greedy and (spec.top_k > 0 or spec.top_p < 1 or spec.min_p > 0)
    return (
        FILTERS * has_filters
        + MASK * spec.has_grammar
        + WORDS * spec.has_words
        + ONLY_ALLOWED * (spec.allowed is not None)
        + COUNTED * spec.has_penalties
        + BAD_WORDS * bool(spec.bad_words)
    )


def row_fields(spec: SamplingSpec) -> Int32:
    """Return a row's fields [len(RowField)]."""
    fields = np.zeros(len(RowField), np.int32)
    fields[RowField.FLAGS] = flags_of(spec)
    fields[[RowField.SEED_LOW, RowField.SEED_HIGH]] = np.array([spec.seed], np.int64).view(np.int32)  # little endian
    fields[RowField.TOP_K] = min(max(spec.top_k, 0), 2**31 - 1)
    fields[RowField.FREE_FROM] = min(spec.first_end, 2**31 - 1)
    floats = fields.view(np.float32)
    floats[[RowField.TEMPERATURE, RowField.TOP_P, RowField.MIN_P]] = spec.temperature, spec.top_p, spec.min_p
    floats[RowField.REPETITION] = spec.repetition_penalty
    floats[[RowField.PRESENCE, RowField.FREQUENCY]] = spec.presence_penalty, spec.frequency_penalty
    return fields


def row_line(spec: SamplingSpec) -> Int32:
    """Return the columns of a row's line that are not 0, each once, and their values, [2, E]."""
    seen = spec.history if spec.has_penalties else spec.history[:0]
    marked: dict[int, npt.ArrayLike] = {
        IN_PROMPT: seen[: spec.num_prompt_tokens],
        ENDS: spec.forbidden,
        ALLOWED: spec.allowed or (),
        COMPLETES: about_to_end(spec.bad_words, spec.history[spec.num_prompt_tokens :]),
    }
    tokens_of = {bit: np.asarray(tokens, np.int64) for bit, tokens in marked.items()}
    sampled, counts = np.unique(seen[spec.num_prompt_tokens :].astype(np.int64), return_counts=True)
    biased = np.array([token for token, _ in spec.bias], np.int64)
    bias = np.array([number for _, number in spec.bias], np.float16)
    words = np.zeros(1 + max(int(ids.max(initial=-1)) for ids in (sampled, biased, *tokens_of.values())), np.int32)
    words[sampled] = np.minimum(counts, COUNT)
    for bit, tokens in tokens_of.items():
        words[tokens] |= bit
    words[biased] |= bias.view(np.int16).astype(np.int32) << BIAS_SHIFT
    (ids,) = words.nonzero()
    line = np.stack([WORDS_AT + ids, words[ids]])
    return np.concatenate([line, *_bad_words(spec)], axis=1) if spec.bad_words else line


def about_to_end(bad_words: Sequence[Sequence[int]], answer: Sequence[int] | TokenIds) -> list[int]:
    """Return the tokens that must not come next: the last token of each bad word whose other tokens end `answer`."""
    last = [int(token) for token in answer[-max(map(len, bad_words), default=1) :]]
    return [word[-1] for word in bad_words if last[len(last) - len(word) + 1 :] == [*word[:-1]]]


def _bad_words(spec: SamplingSpec) -> list[Int32]:
    """Return the columns and values [2, E] of the bad words, and of the newest tokens of the answer."""
    words, end = spec.bad_words, len(spec.history)
    ends, tokens = np.cumsum([len(word) for word in words]), np.concatenate(words)
    recent = np.arange(end - min(end - spec.num_prompt_tokens, max(map(len, words)) - 1), end)
    return [
        np.stack([BAD_ENDS_AT + np.arange(len(ends)), ends]),
        np.stack([BAD_TOKENS_AT + np.arange(len(tokens)), tokens]),
        np.stack([RECENT_AT + recent % RECENT, spec.history[recent] + 1]),
    ]
