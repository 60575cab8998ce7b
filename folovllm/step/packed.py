"""A whole step in one int32 buffer: the host packs it, one copy moves it, the device unpacks it.

The device keeps what does not change from step to step: the block table of each row, the last token drawn for it and how
its tokens are drawn. A step brings only what is new. Floats and seeds travel as the bits of int32 numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from folovllm.draw_row import DrawUpdate, RowField, pack_updates, row_update
from folovllm.step.draw import DrawSpec
from folovllm.step.schedule import SchedulerOutput, Share, tokens_to_score

Int32 = npt.NDArray[np.int32]
IN_FLIGHT = -1  # a token that is on the device and has not come back yet
NOTHING = -1
FLYING = np.array([IN_FLIGHT], np.int32)
NO_DRAWS, NOBODY, NO_SCORES = pack_updates([]), np.empty((2, 0), np.int32), np.empty((4, 0), np.int32)


class Field(IntEnum):
    """Lines of the matrix with which a packed step begins: one number a sequence."""

    TOKEN = 0  # decodes: the newest token, or IN_FLIGHT
    ROW = 1
    SEQ_LEN = 2  # tokens in the cache after the step; 0: padding
    QUERY_LEN = 3
    TEMPERATURE = 4  # float32
    SEED_LOW = 5
    SEED_HIGH = 6
    NEW_BLOCK = 7  # decodes: the block that begins with this token, or NOTHING
    NUM_DRAWS = 8  # tokens to draw


@dataclass(slots=True)
class PackedStep:
    """One step on the host.

    A decode step is the matrix alone, padded to a bucket's width. Other steps also bring the tokens of all sequences
    end to end, entries of block tables as (row, column, block), and how the tokens of new rows are drawn.

    `is_special`: some sequence draws with filters, or from logits that depend on the tokens so far.
    """

    fields: Int32  # [len(Field), width]
    num_seqs: int
    num_decodes: int
    tokens: Int32  # [T], empty in a decode step
    updates: Int32  # [3, U]
    draws: DrawUpdate = NO_DRAWS  # of new rows
    is_special: bool = False
    logprobs: Int32 = field(default_factory=lambda: NOBODY)  # [2, n]: which sequences, how many each
    scores: Int32 = field(default_factory=lambda: NO_SCORES)  # [4, n]: `tokens_to_score`
    draws_late: bool = False  # it stops at its logits, and draws when `Masks` come

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token and the matrix says it all."""
        return not len(self.tokens)

    def flatten(self) -> Int32:
        """What goes to the device, end to end."""
        return np.concatenate([self.fields.ravel(), self.tokens, self.updates.ravel(), self.draws.buffer])


class StepPacker:
    """Packs steps: in the driver, once for all devices that run them."""

    def __init__(self, num_rows: int, buckets: list[int]) -> None:
        """`buckets` are the widths for which a decode step is recorded, ascending."""
        self._padding_row = num_rows
        self._buckets = buckets
        # TEMPERATURE, SEED_LOW and SEED_HIGH of each row, as its first share said.
        self._row_numbers = np.zeros((3, num_rows), np.int32)
        self._special: set[int] = set()  # rows whose draw takes more than temperature and noise
        self._logprobs: dict[int, int] = {}  # by row, where the request wants any

    def pack(self, output: SchedulerOutput) -> PackedStep:
        """One step."""
        shares = output.shares
        width = choose_bucket(len(shares), self._buckets)
        is_decode = width and all(map(is_plain_decode, shares))
        step = self.pack_decode(shares, width) if is_decode else self._pack_mixed(shares)
        if self._special or self._logprobs:
            drawn = [(i, share.row) for i, share in enumerate(shares) if share.num_draws]
            step.is_special = any(row in self._special for _, row in drawn)
            asked = [(i, self._logprobs[row]) for i, row in drawn if row in self._logprobs]
            step.logprobs = np.array(asked, np.int32).reshape(-1, 2).T
        return step

    def pack_decode(self, shares: Sequence[Share], width: int) -> PackedStep:
        """A step in which every sequence has one new token, padded to `width` columns.

        Column i is share i, line by line as `Field` says:

        - TOKEN: `newest_token(share)`; ROW: `share.row`; SEQ_LEN: `share.end`, the new token counted; QUERY_LEN and
          NUM_DRAWS: 1;
        - TEMPERATURE, SEED_LOW and SEED_HIGH: those of the row (`self._row_fields(rows)`, [3, S]);
        - NEW_BLOCK: the one entry of `share.new_blocks`, or NOTHING if that is empty.

        Padding columns have row `self._padding_row`, NOTHING for a block and 0 for the rest: length 0 means that no K/V
        is written and nothing is read.

        Returns:
            A step whose `num_seqs` and `num_decodes` are both `len(shares)`, padding not counted; `tokens` [0] and
            `updates` [3, 0] are empty, of int32 all the same, for `flatten` puts everything into one buffer.
        """
        fields = np.zeros((len(Field), width), np.int32)
        fields[Field.ROW] = self._padding_row
        fields[Field.NEW_BLOCK] = NOTHING
        n = len(shares)
        fields[Field.TOKEN, :n] = [newest_token(share) for share in shares]
        fields[Field.ROW, :n] = rows = [share.row for share in shares]
        fields[Field.SEQ_LEN, :n] = [share.end for share in shares]
        fields[[Field.QUERY_LEN, Field.NUM_DRAWS], :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        fields[Field.NEW_BLOCK, :n] = [share.new_blocks[0] if share.new_blocks else NOTHING for share in shares]
        return PackedStep(fields, n, n, np.empty(0, np.int32), np.empty((3, 0), np.int32))

    def _pack_mixed(self, shares: Sequence[Share]) -> PackedStep:
        """Any step: fields, tokens, blocks that the devices do not know yet, and how new rows are drawn."""
        draws = self._new_draws({share.row: share.draw for share in shares if share.draw is not None})
        fields = np.zeros((len(Field), len(shares)), np.int32)
        fields[Field.ROW] = rows = [share.row for share in shares]
        fields[Field.SEQ_LEN] = [share.end for share in shares]
        fields[Field.QUERY_LEN] = [share.num_new_tokens for share in shares]
        fields[Field.NUM_DRAWS] = [share.num_draws for share in shares]
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1] = self._row_fields(rows)
        tokens = np.concatenate([share.token_ids if len(share.token_ids) else FLYING for share in shares])
        num_decodes = next((i for i, share in enumerate(shares) if share.num_new_tokens > 1), len(shares))
        wanted = np.array(tokens_to_score(shares), np.int32).reshape(-1, 4).T
        return PackedStep(fields, len(shares), num_decodes, tokens, block_updates(shares), draws, scores=wanted)

    def _new_draws(self, new: Mapping[int, DrawSpec]) -> DrawUpdate:
        """How the tokens of rows that have a new owner are drawn: noted here, and what the devices must be told."""
        updates = [row_update(row, spec) for row, spec in new.items()]
        for update, spec in zip(updates, new.values(), strict=True):
            row = update.row
            self._row_numbers[0, row] = np.float32(spec.temperature).view(np.int32)
            # Little endian: the low word comes first.
            self._row_numbers[1:, row] = np.array([spec.seed], np.int64).view(np.int32)
            (self._special.add if update.fields[RowField.FLAGS] else self._special.discard)(row)
            self._logprobs.pop(row, None)
            if spec.logprobs is not None:
                self._logprobs[row] = spec.logprobs
        return pack_updates(updates) if updates else NO_DRAWS

    def _row_fields(self, rows: list[int]) -> Int32:
        """TEMPERATURE, SEED_LOW and SEED_HIGH of the rows, [3, S]."""
        return self._row_numbers[:, rows]


def choose_bucket(num_seqs: int, buckets: list[int]) -> int:
    """The smallest width of `buckets` (ascending) that holds `num_seqs` sequences; 0 if there is none."""
    return next((width for width in buckets if width >= num_seqs), 0)


def newest_token(share: Share) -> int:
    """The one token of a decode, or IN_FLIGHT if the host has not seen it yet."""
    return int(share.token_ids[0]) if len(share.token_ids) else IN_FLIGHT


def is_plain_decode(share: Share) -> bool:
    """One new token to draw after, in a row that the devices know, and at most one new block, which this token goes to.

    A chunk can be one token too; but nothing is drawn in the middle of a prompt.
    """
    is_one = share.num_new_tokens == 1 and share.num_draws == 1
    return is_one and share.draw is None and len(share.new_blocks) < 2


def block_updates(shares: Sequence[Share]) -> Int32:
    """Entries of block tables that the devices do not know yet, [3, U]: row, column, block.

    A share's new blocks are the end of its table, which covers the share and no more.
    """
    updates = [
        (share.row, share.first_new_block + i, block) for share in shares for i, block in enumerate(share.new_blocks)
    ]
    return np.array(updates, np.int32).reshape(-1, 3).T
