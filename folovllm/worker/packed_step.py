"""A whole step in one int32 buffer: packed where it is decided, unpacked where it runs, one copy in between.

The device keeps what does not change from step to step: the block table of each row and the last token drawn for it.
A step brings only what is new. Floats and seeds travel as the bits of int32 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from folovllm.engine.scheduler import ScheduledSequence
from folovllm.forward_batch import ForwardBatch

Int32 = npt.NDArray[np.int32]
IN_FLIGHT = -1  # a token that is on the device and has not come back yet
NOTHING = -1


class Field(IntEnum):
    """Lines of the matrix with which a packed step begins: one number a sequence."""

    TOKEN = 0  # decodes: the newest token, or IN_FLIGHT
    ROW = 1
    SEQ_LEN = 2  # tokens in the cache after the step; 0: padding
    QUERY_LEN = 3
    TEMPERATURE = 4  # float32
    SEED_LOW = 5
    SEED_HIGH = 6
    NEW_BLOCK = 7  # decodes: the page that begins with this token, or NOTHING


@dataclass(slots=True)
class PackedStep:
    """One step on the host.

    A decode step is the matrix alone, padded to a bucket's width. Other steps also bring the tokens of all sequences
    end to end, and entries of block tables as (row, column, page).
    """

    fields: Int32  # [len(Field), width]
    num_seqs: int
    num_decodes: int
    tokens: Int32  # [T], empty in a decode step
    updates: Int32  # [3, U]

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token and the matrix says it all."""
        return not len(self.tokens)

    def flatten(self) -> Int32:
        """All of it, end to end."""
        return np.concatenate([self.fields.ravel(), self.tokens, self.updates.ravel()])


class StepPacker:
    """The driver's side: knows what each row's part of the device tables already holds."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self._padding_row = num_rows
        self._block_size = block_size
        self._temperature = np.zeros(num_rows, np.float32)  # [rows], as they were when their sequences came
        self._seeds = np.zeros(num_rows, np.int64)  # [rows]

    def pack(self, items: list[ScheduledSequence], buckets: list[int]) -> PackedStep:
        """One step; `buckets` are the widths for which a decode step is recorded, ascending."""
        for item in items:
            if item.seq.num_sent_blocks == 0:
                self._temperature[item.seq.row] = item.seq.params.temperature
                self._seeds[item.seq.row] = item.seq.seed
        width = choose_bucket(len(items), buckets)
        if width and all(is_plain_decode(item) for item in items):
            return self.pack_decode(items, width)
        return self._pack_mixed(items)

    def pack_decode(self, items: list[ScheduledSequence], width: int) -> PackedStep:
        """A step in which every sequence has one new token, padded to `width` columns.

        Column i is item i, line by line as `Field` says:

        - TOKEN: `newest_token(item)`; ROW: `seq.row`; SEQ_LEN: `item.start + 1` (the host's `seq.num_tokens` does not
          count a token in flight); QUERY_LEN: 1;
        - TEMPERATURE, SEED_LOW and SEED_HIGH: those of the row (`self._row_fields(rows)`, [3, S]);
        - NEW_BLOCK: the last page of `seq.block_table` if the device does not know it yet (the table is longer than
          `seq.num_sent_blocks`, which then becomes its length), else NOTHING.

        Padding columns have row `self._padding_row`, NOTHING for a page and 0 for the rest: length 0 means that no K/V
        is written and nothing is read.

        Returns:
            A step whose `num_seqs` and `num_decodes` are both `len(items)`, padding not counted; `tokens` [0] and
            `updates` [3, 0] are empty, of int32 all the same, for `flatten` puts everything into one buffer.
        """
        fields = np.zeros((len(Field), width), np.int32)
        fields[Field.ROW] = self._padding_row
        fields[Field.NEW_BLOCK] = NOTHING
        n = len(items)
        fields[Field.TOKEN, :n] = [newest_token(item) for item in items]
        fields[Field.ROW, :n] = rows = [item.seq.row for item in items]
        fields[Field.SEQ_LEN, :n] = [item.start + 1 for item in items]
        fields[Field.QUERY_LEN, :n] = 1
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1, :n] = self._row_fields(rows)
        for i, item in enumerate(items):
            table = item.seq.block_table
            if len(table) > item.seq.num_sent_blocks:
                fields[Field.NEW_BLOCK, i] = table[-1]
                item.seq.num_sent_blocks = len(table)
        return PackedStep(fields, n, n, np.empty(0, np.int32), np.empty((3, 0), np.int32))

    def _pack_mixed(self, items: list[ScheduledSequence]) -> PackedStep:
        """Any step: fields, tokens, and the pages that the device does not know yet."""
        fields = np.zeros((len(Field), len(items)), np.int32)
        fields[Field.ROW] = rows = [item.seq.row for item in items]
        fields[Field.SEQ_LEN] = [item.start + item.num_new_tokens for item in items]
        fields[Field.QUERY_LEN] = [item.num_new_tokens for item in items]
        fields[Field.TEMPERATURE : Field.SEED_HIGH + 1] = self._row_fields(rows)
        tokens = [
            item.seq.token_ids[item.start : item.start + item.num_new_tokens]
            if item.start < item.seq.num_tokens
            else np.array([IN_FLIGHT], np.int32)
            for item in items
        ]
        num_decodes = next((i for i, item in enumerate(items) if item.num_new_tokens > 1), len(items))
        return PackedStep(fields, len(items), num_decodes, np.concatenate(tokens), self._updates(items))

    def _updates(self, items: list[ScheduledSequence]) -> Int32:
        """Entries of block tables that the device does not know yet, [3, U]: row, column, page."""
        updates = []
        for item in items:
            seq = item.seq
            for column in range(seq.num_sent_blocks, len(seq.block_table)):
                updates.append((seq.row, column, seq.block_table[column]))
            seq.num_sent_blocks = len(seq.block_table)
        return np.array(updates, np.int32).reshape(-1, 3).T

    def _row_fields(self, rows: list[int]) -> Int32:
        """TEMPERATURE, SEED_LOW and SEED_HIGH of the rows, [3, S]."""
        seeds = self._seeds[rows].view(np.int32).reshape(-1, 2)  # little endian: the low word comes first
        return np.stack([self._temperature[rows].view(np.int32), seeds[:, 0], seeds[:, 1]])


def choose_bucket(num_seqs: int, buckets: list[int]) -> int:
    """The smallest width of `buckets` (ascending) that holds `num_seqs` sequences; 0 if there is none."""
    return next((width for width in buckets if width >= num_seqs), 0)


def newest_token(item: ScheduledSequence) -> int:
    """The one token of a decode, or IN_FLIGHT if the host has not seen it yet."""
    seq = item.seq
    return int(seq.token_ids[item.start]) if item.start < seq.num_tokens else IN_FLIGHT


def is_plain_decode(item: ScheduledSequence) -> bool:
    """One new token, and at most one page that the device does not know, the one this token goes to."""
    return item.num_new_tokens == 1 and 0 < len(item.seq.block_table) <= item.seq.num_sent_blocks + 1


class DeviceTables:
    """The device's side: block tables and last tokens by row, with one row more for padding."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_tables = torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._block_size = block_size
        self._counting = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def unpack_decode(self, fields: torch.Tensor, max_seq_len: int) -> ForwardBatch:
        """The batch of a padded decode step, from [len(Field), width] on the device. Device work only.

        Padding has length 0, position 0 and slot -1.
        """
        input_ids, positions, slots, tables = self._unpack(fields)
        width = fields.shape[1]
        seq_lens = fields[Field.SEQ_LEN]
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slots,
            query_start_loc=self._counting[: width + 1],
            seq_lens=seq_lens,
            block_tables=tables,
            logits_indices=self._counting[:width],
            num_seqs=width,
            num_decodes=width,
            max_query_len=1,
            max_seq_len=max_seq_len,
            query_lens_host=[1] * width,
            seq_lens_host=seq_lens.tolist() if fields.device.type == "cpu" else [],
        )

    def _unpack(self, fields: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Input ids, positions, slots [S] and block tables [S, max_blocks]; new pages are entered on the way."""
        if fields.is_cuda:  # one kernel instead of a dozen
            from folovllm.kernels.unpack_step import unpack_decode

            lines = (int(Field.TOKEN), int(Field.ROW), int(Field.SEQ_LEN), int(Field.NEW_BLOCK))
            return unpack_decode(fields, self.block_tables, self.last_token, self._block_size, lines)
        rows, seq_lens, new_block = fields[Field.ROW].long(), fields[Field.SEQ_LEN], fields[Field.NEW_BLOCK]
        positions = (seq_lens - 1).clamp(min=0).long()
        column = positions // self._block_size
        pages = torch.where(new_block == NOTHING, self.block_tables[rows, column], new_block)
        self.block_tables[rows, column] = pages
        slots = pages.long() * self._block_size + positions % self._block_size
        given = fields[Field.TOKEN].long()
        input_ids = torch.where(given == IN_FLIGHT, self.last_token[rows], given)
        return input_ids, positions, torch.where(seq_lens > 0, slots, -1), self.block_tables[rows]

    def unpack_mixed(self, step: PackedStep, flat: torch.Tensor) -> ForwardBatch:
        """The batch of any step, from its flattened buffer [n] int32 on the device."""
        device = flat.device
        num_fields, num_tokens = step.fields.size, len(step.tokens)
        fields = flat[:num_fields].view(step.fields.shape)
        tokens = flat[num_fields : num_fields + num_tokens].long()
        row, column, page = flat[num_fields + num_tokens :].view(3, -1)
        self.block_tables[row.long(), column.long()] = page
        rows, seq_lens, query_lens = fields[Field.ROW].long(), fields[Field.SEQ_LEN], fields[Field.QUERY_LEN]
        ends = query_lens.cumsum(0)
        which = torch.repeat_interleave(torch.arange(len(rows), device=device), query_lens, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=device) + (seq_lens - ends)[which]
        tables = self.block_tables[rows]
        pages = tables[which, positions // self._block_size].long()
        return ForwardBatch(
            input_ids=torch.where(tokens == IN_FLIGHT, self.last_token[rows[which]], tokens),
            positions=positions,
            slot_mapping=pages * self._block_size + positions % self._block_size,
            query_start_loc=torch.nn.functional.pad(ends, (1, 0)).int(),
            seq_lens=seq_lens,
            block_tables=tables,
            logits_indices=(ends - 1).long(),
            num_seqs=len(rows),
            num_decodes=step.num_decodes,
            max_query_len=int(step.fields[Field.QUERY_LEN].max()),
            max_seq_len=int(step.fields[Field.SEQ_LEN].max()),
            query_lens_host=step.fields[Field.QUERY_LEN].tolist(),
            seq_lens_host=step.fields[Field.SEQ_LEN].tolist(),
        )
