"""A whole step in one int32 buffer: the host packs it, one copy moves it, the device unpacks it.

The device keeps the state of each row: its block table, its last sampled token, and how its tokens are sampled. A step brings
only what is new. Floats and seeds are sent as the bits of int32 numbers.

All steps have one layout, `Parts`: decodes, prompts, chunks, drafts to verify, and messages to other ranks. A step is ragged
in two ways: a sequence has any number of new tokens, and any number of tokens is sampled for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from folovllm.sample.sampling_row import MEMORY, RowField, SamplingUpdate, pack_rows
from folovllm.step.schedule import Extras, Int32, SamplingSpec, ScheduledSequence, SchedulerOutput
from folovllm.step.scores import tokens_to_score

if TYPE_CHECKING:
    import torch

IN_FLIGHT = -1  # stands for a token that is on the device and not yet on the host
NOTHING = -1
OWNER_BYTES = 16  # of an owner's name in a packed step
IN_FLIGHT_TOKENS = np.array([IN_FLIGHT], np.int32)


class Field(IntEnum):
    """Lines of the first matrix of a packed step: each has one number a sequence."""

    TOKEN = 0  # decodes: the newest token, or IN_FLIGHT
    ROW = 1
    SEQ_LEN = 2  # tokens in the cache after the step; 0: padding
    QUERY_LEN = 3
    TEMPERATURE = 4  # float32
    SEED_LOW = 5
    SEED_HIGH = 6
    NEW_BLOCK = 7  # decodes: the block that begins with this token, or NOTHING
    NUM_SAMPLES = 8  # tokens to sample


class Sample(IntEnum):
    """Lines of the matrix of samples: one number for each token that is sampled, sequence by sequence.

    ROW, TEMPERATURE and the seeds have the same lines as in `Field`, and POSITION has the line of SEQ_LEN. So the first matrix
    of a decode step, which samples one token a sequence, is also the matrix of its samples.
    """

    # the draft token at this position: the next sample counts only if it was sampled; NOTHING after the last one
    DRAFT = 0
    ROW = 1
    POSITION = 2  # index of the token to sample in its sequence
    AFTER = 3  # index in the step of the token after which it is sampled
    TEMPERATURE = 4
    SEED_LOW = 5
    SEED_HIGH = 6
    SEQUENCE = 7  # its column in the first matrix
    COUNTS = 8  # 0: the sequence is in the middle of its prompt, so this token is dropped


Array = TypeVar("Array", Int32, "torch.Tensor")
Part = TypeVar("Part")


class Parts(NamedTuple, Generic[Part]):
    """The parts of a step's buffer, in their order. `Parts[int]` holds the number of columns of each."""

    fields: Part  # [len(Field), S]
    tokens: Part  # [T]; empty in a decode step, whose fields hold its tokens
    samples: Part  # [len(Sample), R]; empty in a decode step
    updates: Part  # [3, U], new entries of block tables: row, column, block
    sampling_updates: Part  # [D], sampling state of new rows: `SamplingUpdate.buffer`
    scores: Part  # [4, n]: `tokens_to_score`
    logprobs: Part  # [2, n]: index of each sample that reports log-probabilities, and how many it reports
    extras: Part  # [E], what only some steps carry: `pack_extras`


LINES = Parts(len(Field), 1, len(Sample), 3, 1, 4, 2, 1)


def split(buffer: Array, columns: Parts[int]) -> Parts[Array]:
    """Return the parts of a buffer, on the host or on a device, as views."""
    found, at = [], 0
    for lines, width in zip(LINES, columns, strict=True):
        part = buffer[at : at + lines * width]
        found.append(part if lines == 1 else part.reshape(lines, width))
        at += lines * width
    return Parts(*found)


NO_UPDATES = SamplingUpdate(np.empty(0, np.int32), 0, 0)
NO_SAMPLES, NO_SCORES = np.empty((len(Sample), 0), np.int32), np.empty((4, 0), np.int32)
NOBODY, NO_EXTRAS = np.empty((2, 0), np.int32), np.empty(0, np.int32)


@dataclass(slots=True)
class PackedStep:
    """One step on the host.

    A decode step has the first matrix, padded to a bucket's width, and `logprobs` if a request wants them. Other steps have
    more `Parts`.

    Attributes:
        is_special: a sequence samples with filters, or from logits that depend on the tokens so far.
        has_memory: a sequence samples from logits that depend on the tokens so far.
        defers_sampling: the step stops at its logits and samples when its `TokenBitmasks` arrive.
        is_decode: every sequence has one new token, and the first matrix describes all of them.
        num_samples: R, the number of sampled tokens.
        has_drafts: a sequence samples more than one token.
    """

    fields: Int32  # [len(Field), width]
    num_seqs: int
    num_decodes: int
    tokens: Int32  # [T]
    updates: Int32  # [3, U]
    samples: Int32 = field(default_factory=lambda: NO_SAMPLES)
    sampling_updates: SamplingUpdate = NO_UPDATES  # of new rows
    scores: Int32 = field(default_factory=lambda: NO_SCORES)
    logprobs: Int32 = field(default_factory=lambda: NOBODY)
    extras: Int32 = field(default_factory=lambda: NO_EXTRAS)
    is_special: bool = False
    has_memory: bool = False
    defers_sampling: bool = False
    is_decode: bool = field(init=False)
    num_samples: int = field(init=False)
    has_drafts: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_decode = not len(self.tokens)
        self.num_samples = self.num_seqs if self.is_decode else self.samples.shape[1]
        self.has_drafts = not self.is_decode and bool(self.fields[Field.NUM_SAMPLES].max() > 1)

    @property
    def parts(self) -> Parts[Int32]:
        """All parts of the step's buffer."""
        head, tail = (self.fields, self.tokens, self.samples, self.updates), (self.scores, self.logprobs, self.extras)
        return Parts(*head, self.sampling_updates.buffer, *tail)

    @property
    def columns(self) -> Parts[int]:
        """The number of columns of each part."""
        return Parts(*[part.shape[-1] for part in self.parts])

    def flatten(self, header: Sequence[int] = ()) -> Int32:
        """Return all parts end to end, as the device receives them. Messages to other processes begin with a `header`."""
        return np.concatenate([np.array(header, np.int32), *(part.ravel() for part in self.parts)])


class StepPacker:
    """Packs steps in the driver, once for all devices."""

    def __init__(self, num_rows: int, buckets: list[int]) -> None:
        """`buckets` are the widths for which a decode step is captured, ascending."""
        self._padding_row = num_rows
        self._buckets = buckets
        self._row_numbers = np.zeros((3, num_rows), np.int32)  # TEMPERATURE, SEED_LOW and SEED_HIGH of each row
        # Rows that sample with more than temperature and noise: whether their logits depend on the tokens so far.
        self._special: dict[int, bool] = {}
        self._logprobs: dict[int, int] = {}  # number of log-probabilities by row, for requests that want them

    def pack(self, output: SchedulerOutput) -> PackedStep:
        """Pack one step."""
        scheduled_seqs = output.scheduled_seqs
        width = choose_bucket(len(scheduled_seqs), self._buckets)
        is_decode = width and all(map(is_plain_decode, scheduled_seqs))
        step = self.pack_decode(scheduled_seqs, width) if is_decode else self._pack_mixed(scheduled_seqs)
        if output.extras is not None:
            step.extras = pack_extras(output.extras)
        if self._special or self._logprobs:
            sampled = [scheduled.row for scheduled in scheduled_seqs if scheduled.num_samples]
            special = [self._special[row] for row in sampled if row in self._special]
            step.is_special, step.has_memory = bool(special), any(special)
            if not self._logprobs.keys().isdisjoint(sampled):
                step.logprobs = self._asked_logprobs(step)
        return step

    def pack_decode(self, scheduled_seqs: Sequence[ScheduledSequence], width: int) -> PackedStep:
        """A step in which every sequence has one new token, padded to `width` columns.

        Column i is `scheduled_seqs[i]`, line by line as `Field` says:

        - TOKEN: `newest_token(scheduled)`; ROW: `scheduled.row`; SEQ_LEN: `scheduled.end`, the new token counted; QUERY_LEN and
          NUM_SAMPLES: 1;
        - TEMPERATURE, SEED_LOW and SEED_HIGH: those of the row (`self._row_fields(rows)`, [3, S]);
        - NEW_BLOCK: the one entry of `scheduled.new_blocks`, or NOTHING if that is empty.

        Padding columns have row `self._padding_row`, NOTHING for a block and 0 for the rest: length 0 means that no K/V
        is written and nothing is read.

        Returns:
            A step whose `num_seqs` and `num_decodes` are both `len(scheduled_seqs)`, padding not counted; `tokens` [0] and
            `updates` [3, 0] are empty, of int32 all the same, for `flatten` puts everything into one buffer. Its arrays are
            its own: the step before may still wait for its copy.
        """
        fields = np.zeros((len(Field), width), np.int32)
        fields[Field.ROW] = self._padding_row
        fields[Field.NEW_BLOCK] = NOTHING
        n = len(scheduled_seqs)
        fields[Field.TOKEN, :n] = [newest_token(scheduled) for scheduled in scheduled_seqs]
        fields[Field.ROW, :n] = rows = [scheduled.row for scheduled in scheduled_seqs]
        fields[Field.SEQ_LEN, :n] = [scheduled.end for scheduled in scheduled_seqs]
        fields[[Field.QUERY_LEN, Field.NUM_SAMPLES], :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        fields[Field.NEW_BLOCK, :n] = [
            scheduled.new_blocks[0] if scheduled.new_blocks else NOTHING for scheduled in scheduled_seqs
        ]
        return PackedStep(fields, n, n, np.empty(0, np.int32), np.empty((3, 0), np.int32))

    def _pack_mixed(self, scheduled_seqs: Sequence[ScheduledSequence]) -> PackedStep:
        """Pack any step: fields, tokens, samples, new entries of block tables, and the sampling state of new rows."""
        n, fields = len(scheduled_seqs), fields_of(scheduled_seqs)
        new = {scheduled.row: scheduled.sampling for scheduled in scheduled_seqs if scheduled.sampling is not None}
        sampling_updates = self._new_specs(new)
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1] = self._row_fields(fields[Field.ROW].tolist())
        tokens = np.concatenate(
            [scheduled.token_ids if len(scheduled.token_ids) else IN_FLIGHT_TOKENS for scheduled in scheduled_seqs]
        )
        num_decodes = next((i for i, length in enumerate(fields[Field.QUERY_LEN]) if length > 1), n)
        wanted = np.array(tokens_to_score(scheduled_seqs), np.int32).reshape(-1, 4).T
        samples, updates = samples_of(fields, tokens), block_updates(scheduled_seqs)
        return PackedStep(fields, n, num_decodes, tokens, updates, samples, sampling_updates, wanted)

    def _asked_logprobs(self, step: PackedStep) -> Int32:
        """Return the samples that report log-probabilities, and how many each reports, [2, n]."""
        rows, counts = step.fields[Field.ROW, : step.num_seqs], step.fields[Field.NUM_SAMPLES, : step.num_seqs]
        if not step.is_decode:
            rows, counts = step.samples[Sample.ROW], step.samples[Sample.COUNTS]
        asked = [
            (i, self._logprobs[row])
            for i, (row, counted) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True))
            if counted and row in self._logprobs
        ]
        return np.array(asked, np.int32).reshape(-1, 2).T

    def _new_specs(self, new: Mapping[int, SamplingSpec]) -> SamplingUpdate:
        """Store the sampling parameters of rows with a new sequence, and return the update for the devices."""
        if not new:
            return NO_UPDATES
        update = pack_rows(new)
        rows, fields = update.fields[:, 0], update.fields[:, 1:]
        self._row_numbers[:, rows] = fields[:, RowField.TEMPERATURE : RowField.SEED_HIGH + 1].T
        for row, flags in zip(rows.tolist(), fields[:, RowField.FLAGS].tolist(), strict=True):
            self._special.pop(row, None)
            if flags:
                self._special[row] = bool(flags & MEMORY)
            self._logprobs.pop(row, None)
            if (logprobs := new[row].logprobs) is not None:
                self._logprobs[row] = logprobs
        return update

    def _row_fields(self, rows: list[int]) -> Int32:
        """Return TEMPERATURE, SEED_LOW and SEED_HIGH of the rows, [3, S]."""
        return self._row_numbers[:, rows]


def choose_bucket(num_seqs: int, buckets: list[int]) -> int:
    """The smallest width of `buckets` (ascending) that holds `num_seqs` sequences; 0 if there is none."""
    return next((width for width in buckets if width >= num_seqs), 0)


def newest_token(scheduled: ScheduledSequence) -> int:
    """Return the new token of a decode, or IN_FLIGHT if it is not on the host yet."""
    return int(scheduled.token_ids[0]) if len(scheduled.token_ids) else IN_FLIGHT


def is_plain_decode(scheduled: ScheduledSequence) -> bool:
    """Return whether a sequence fits the layout of a decode step.

    It does if it has one new token, samples one token, has no new sampling parameters and at most one new block. A chunk of one
    token in the middle of a prompt samples nothing, so it is no decode.
    """
    is_one = scheduled.end - scheduled.start == 1 and scheduled.num_samples == 1
    return is_one and scheduled.sampling is None and len(scheduled.new_blocks) < 2


def fields_of(scheduled_seqs: Sequence[ScheduledSequence]) -> Int32:
    """Return the first matrix [len(Field), S] of any step. Temperatures and seeds are still 0."""
    fields = np.zeros((len(Field), len(scheduled_seqs)), np.int32)
    fields[Field.ROW] = [scheduled.row for scheduled in scheduled_seqs]
    fields[Field.SEQ_LEN] = [scheduled.end for scheduled in scheduled_seqs]
    fields[Field.QUERY_LEN] = [scheduled.num_new_tokens for scheduled in scheduled_seqs]
    fields[Field.NUM_SAMPLES] = [scheduled.num_samples for scheduled in scheduled_seqs]
    return fields


def samples_of(fields: Int32, tokens: Int32) -> Int32:
    """Return the samples [len(Sample), R] of sequences with these `fields` [len(Field), S] and new `tokens` [T].

    A sequence that samples n tokens samples one after each of its last n new tokens. The last n - 1 of these are its draft
    tokens. Without drafts each sequence has one sample, after its last token, even if the sample does not count.
    """
    num_samples = fields[Field.NUM_SAMPLES]
    has_drafts = bool(num_samples.max(initial=0) > 1)
    sequence = np.arange(len(num_samples)).repeat(num_samples if has_drafts else 1)
    samples = fields[:, sequence]
    samples[Sample.SEQUENCE], samples[Sample.COUNTS] = sequence, num_samples[sequence] > 0
    samples[Sample.AFTER], samples[Sample.DRAFT] = (fields[Field.QUERY_LEN].cumsum() - 1)[sequence], NOTHING
    if has_drafts:
        left = num_samples.cumsum()[sequence] - 1 - np.arange(len(sequence))  # later samples of the same sequence
        samples[[Sample.POSITION, Sample.AFTER]] -= left.astype(np.int32)
        following = tokens[np.minimum(samples[Sample.AFTER] + 1, len(tokens) - 1)]
        samples[Sample.DRAFT] = np.where(left > 0, following, NOTHING)
    return samples


def sample_levels(samples: Int32) -> list[npt.NDArray[np.int64]]:
    """Return the columns of samples by level: the first sample of each sequence, then the second ones, and so on."""
    sequence = samples[Sample.SEQUENCE]
    first = np.searchsorted(sequence, sequence)  # of the same sequence
    level = np.arange(len(sequence)) - first
    return [(level == n).nonzero()[0] for n in range(int(level.max(initial=-1)) + 1)]


def pack_extras(extras: Extras) -> Int32:
    """Return what only some steps carry as one line of numbers: each owner's name, the shape of its matrix, and the matrix."""
    parts = []
    for owner, matrix in extras.items():
        name = np.frombuffer(owner.encode().ljust(OWNER_BYTES), np.int32)
        parts += [name, np.array(matrix.shape, np.int32), matrix.ravel()]
    return np.concatenate(parts)


def unpack_extras(numbers: Int32) -> Extras:
    """Return what `pack_extras` packed."""
    extras, at, width = {}, 0, OWNER_BYTES // 4
    while at < len(numbers):
        owner = numbers[at : at + width].tobytes().decode().rstrip()
        rows, columns = numbers[at + width : at + width + 2].tolist()
        at += width + 2
        extras[owner] = numbers[at : at + rows * columns].reshape(rows, columns)
        at += rows * columns
    return extras


def block_updates(scheduled_seqs: Sequence[ScheduledSequence]) -> Int32:
    """Return the new entries of block tables, [3, U]: row, column, block."""
    updates = [
        (scheduled.row, scheduled.first_new_block + i, block)
        for scheduled in scheduled_seqs
        for i, block in enumerate(scheduled.new_blocks)
    ]
    return np.array(updates, np.int32).reshape(-1, 3).T
