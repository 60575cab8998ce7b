"""The sampling state of a row on the device: its fields, then a word and two bits for each token of the vocabulary.

All are int32, so one buffer brings the updates of all rows. This file is the host's side: the layout, and the code that writes
it. `folovllm/sample/sampler_state.py` is the device's side.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from folovllm.step.sampling_spec import SamplingSpec, about_to_end

Int32 = npt.NDArray[np.int32]


class RowField(IntEnum):
    """Fields of a row. Floats are stored as the bits of int32 numbers, a seed as two int32 numbers."""

    FLAGS = 0  # FILTERS, WORDS, MASK, BAD
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
WORDS = 2  # the row's logits depend on its words: penalties, min_tokens, biases
MASK = 4  # only tokens whose bit in the row's mask is set may be sampled
BAD = 8  # the row has bad words; tokens that would complete one have a bit
FLAGS_OF_MEMORY = WORDS | BAD  # the row's logits depend on the tokens that were sampled before

# A word: the token's count in the answer, two bits, and a bias on its logit as the bits of a float16.
COUNT = (1 << 14) - 1  # the largest count: a count stays there
ENDS = 1 << 14  # forbidden before FREE_FROM
IN_PROMPT = 1 << 15
BIAS_SHIFT = 16

# A row's line in the table of words: V words, then the fields below. An entry for the n-th number behind the words has the
# column -1 - n, so the code that writes entries does not depend on V.
MAX_BAD_WORDS, MAX_BAD_TOKENS = 128, 1024  # of a row: bad words, and the tokens of all of them
BAD_ENDS_AT = 0  # [MAX_BAD_WORDS]: the end of each bad word in BAD_TOKENS_AT; 0 after the last
BAD_TOKENS_AT = BAD_ENDS_AT + MAX_BAD_WORDS  # [MAX_BAD_TOKENS]: the bad words end to end
RECENT = MAX_BAD_TOKENS  # newest tokens of the answer that are kept
RECENT_AT = BAD_TOKENS_AT + MAX_BAD_TOKENS  # [RECENT]: token id + 1 at its position % RECENT; 0: none
MASK_AT = (
    RECENT_AT + RECENT
)  # for every BITS_OF tokens an int32 of the mask, and one of the tokens that must not come next
BITS_OF = 32  # bit t % 32 is token t's
PLANES = 2
ALIGNED = 64  # columns: lines are aligned for the GPU's reads


def mask_width(vocab_size: int) -> int:
    """Return how many int32 numbers hold a bit for each token."""
    return -(-vocab_size // BITS_OF)


def line_width(vocab_size: int) -> int:
    """Return the number of columns of a row's line."""
    width = vocab_size + MASK_AT + PLANES * mask_width(vocab_size)
    return -(-width // ALIGNED) * ALIGNED


def mask_of(allowed: Iterable[int], vocab_size: int) -> Int32:
    """Return the mask [ceil(V / 32)] in which only the bits of `allowed` are set."""
    return _bits(np.array(list(allowed), np.int64), mask_width(vocab_size))


def _bits(ids: npt.NDArray[np.int64], width: int) -> Int32:
    words = np.zeros(width, np.uint32)
    np.bitwise_or.at(words, ids // BITS_OF, np.uint32(1) << (ids % BITS_OF).astype(np.uint32))
    return words.view(np.int32)


@dataclass(slots=True, frozen=True)
class RowUpdate:
    """The whole sampling state of one row. It is sent when a sequence gets the row, also after a preemption."""

    row: int
    fields: Int32  # [len(RowField)]
    words: Int32  # [2, E]: columns of the row's line, each once, and their values; all other columns are 0

    @property
    def has_line(self) -> bool:
        """Whether sampling reads the row's line."""
        return bool(self.fields[RowField.FLAGS] & (WORDS | MASK | BAD))


@dataclass(slots=True, frozen=True)
class SamplingUpdate:
    """Updates of several rows as one buffer: `SamplerState.set_rows(buffer on the device, num_rows, num_with_line)`."""

    buffer: Int32  # [U, 1 + len(RowField)]: rows and their fields; then [3, E]: entries of row, column, value
    num_rows: int
    num_with_line: int  # rows with a line come first


def row_update(row: int, spec: SamplingSpec) -> RowUpdate:
    """Return the sampling state for the sequence that gets `row`."""
    has_words, has_bad = spec.has_penalties or bool(spec.forbidden) or bool(spec.bias), bool(spec.bad_words)
    fields = np.zeros(len(RowField), np.int32)
    fields[RowField.FLAGS] = FILTERS * spec.has_filters + WORDS * has_words + MASK * spec.has_mask + BAD * has_bad
    fields[[RowField.SEED_LOW, RowField.SEED_HIGH]] = np.array([spec.seed], np.int64).view(np.int32)  # little endian
    fields[RowField.TOP_K] = min(max(spec.top_k, 0), 2**31 - 1)
    fields[RowField.FREE_FROM] = min(spec.first_end, 2**31 - 1)
    floats = fields.view(np.float32)
    floats[[RowField.TEMPERATURE, RowField.TOP_P, RowField.MIN_P]] = spec.temperature, spec.top_p, spec.min_p
    floats[RowField.REPETITION] = spec.repetition_penalty
    floats[[RowField.PRESENCE, RowField.FREQUENCY]] = spec.presence_penalty, spec.frequency_penalty
    parts = [np.empty((2, 0), np.int32)]
    if has_words:
        parts.append(_words(spec))
    if spec.allowed is not None:
        parts.append(_plane(0, spec.allowed))
    if has_bad:
        parts += _bad_words(spec)
    return RowUpdate(row, fields, np.concatenate(parts, axis=1))


def _words(spec: SamplingSpec) -> Int32:
    """Return token ids and their words [2, E], for words that are not 0."""
    bias = dict(spec.bias)
    sampled, counts = np.unique(spec.answer, return_counts=True)
    prompt, ends = np.unique(spec.history[: spec.num_prompt_tokens]), np.unique(spec.forbidden)
    groups = [
        (sampled, np.minimum(counts, COUNT)),
        (prompt, np.full(len(prompt), IN_PROMPT)),
        (ends, np.full(len(ends), ENDS)),
        (np.array(list(bias)), np.array(list(bias.values()), np.float16).view(np.int16).astype(np.int32) << BIAS_SHIFT),
    ]
    every, values = (np.concatenate(parts).astype(np.int32) for parts in zip(*groups, strict=True))
    ids, place = np.unique(every, return_inverse=True)
    words = np.zeros(len(ids), np.int32)
    np.bitwise_or.at(words, place, values)
    return np.stack([ids, words])


def _behind(at: int, values: npt.ArrayLike) -> Int32:
    """Return entries [2, E] that write `values` behind the words, from the number `at` on."""
    values = np.asarray(values, np.int32)
    return np.stack([-1 - at - np.arange(len(values), dtype=np.int32), values])


def _plane(plane: int, tokens: Sequence[int]) -> Int32:
    """Return entries [2, E] that set the bits of `tokens`: in the mask (plane 0), or as tokens that must not come next (1)."""
    ids = np.array(tokens, np.int64)
    words = _bits(ids, int(ids.max(initial=-1)) // BITS_OF + 1)
    (used,) = words.nonzero()
    return np.stack([-1 - MASK_AT - plane - PLANES * used.astype(np.int32), words[used]])


def _bad_words(spec: SamplingSpec) -> list[Int32]:
    """Return entries [2, E] for the bad words, the newest tokens of the answer, and the tokens that must not come next."""
    words, end = spec.bad_words, len(spec.history)
    count = min(len(spec.answer), max(map(len, words)) - 1)
    recent = _behind(0, spec.history[end - count :] + 1)
    recent[0] = -1 - RECENT_AT - np.arange(end - count, end) % RECENT
    return [
        _behind(BAD_ENDS_AT, np.cumsum([len(word) for word in words])),
        _behind(BAD_TOKENS_AT, np.concatenate(words)),
        recent,
        _plane(1, about_to_end(words, spec.answer)),
    ]


def pack_updates(updates: Sequence[RowUpdate]) -> SamplingUpdate:
    """Pack updates of different rows into one buffer, which is empty if there are none."""
    ordered = sorted(updates, key=lambda update: not update.has_line)
    lines = [np.concatenate([np.array([update.row], np.int32), update.fields]) for update in ordered]
    rows = np.repeat([update.row for update in ordered], [update.words.shape[1] for update in ordered])
    words = [update.words for update in ordered] or [np.empty((2, 0), np.int32)]
    entries = np.concatenate([rows[None].astype(np.int32), np.concatenate(words, axis=1)])
    buffer = np.concatenate([*lines, entries.ravel()]).astype(np.int32)
    return SamplingUpdate(buffer, len(ordered), sum(update.has_line for update in ordered))
