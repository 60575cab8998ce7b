"""Builds the tensors of one step from its scheduled sequences. Packed steps (M6) are unpacked on the device instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.schedule import ScheduledSequence

Ints = npt.NDArray[np.int64]
SlotsOf = Callable[[list[int], int, int, int], Ints]  # `KVCacheManager.slots`


@dataclass(slots=True)
class RaggedArrays:
    """The per-token fields of a `ForwardBatch` as numpy arrays on the host."""

    input_ids: Ints  # [T]
    positions: Ints  # [T]
    slot_mapping: Ints  # [T]
    query_start_loc: Ints  # [S+1]
    logits_indices: Ints  # [S]


class InputBatch:
    """Turns the scheduled sequences of a step into a `ForwardBatch` on the device.

    A step brings the new entries of each sequence's block table. The earlier entries are kept here, by row.
    """

    def __init__(self, slots: SlotsOf, block_size: int, device: torch.device) -> None:
        self._slots = slots
        self._block_size = block_size
        self._device = device
        self.block_tables: dict[int, list[int]] = {}  # by row

    def build(self, scheduled_seqs: Sequence[ScheduledSequence]) -> ForwardBatch:
        """Return the device tensors of one step."""
        self.note_blocks(scheduled_seqs)
        arrays = self.flatten(scheduled_seqs)
        query_lens = [scheduled.num_new_tokens for scheduled in scheduled_seqs]
        seq_lens = [scheduled.end for scheduled in scheduled_seqs]
        tables = [self.block_tables[scheduled.row] for scheduled in scheduled_seqs]
        return ForwardBatch(
            input_ids=self._tensor(arrays.input_ids),
            positions=self._tensor(arrays.positions),
            slot_mapping=self._tensor(arrays.slot_mapping),
            query_start_loc=self._tensor(arrays.query_start_loc.astype(np.int32)),
            seq_lens=self._tensor(np.array(seq_lens, np.int32)),
            block_tables=self._tensor(padded_tables(tables)),
            logits_indices=self._tensor(arrays.logits_indices),
            num_seqs=len(scheduled_seqs),
            num_decodes=next((i for i, n in enumerate(query_lens) if n > 1), len(scheduled_seqs)),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
            rows=self._tensor(np.array([scheduled.row for scheduled in scheduled_seqs])),
        )

    def note_blocks(self, scheduled_seqs: Sequence[ScheduledSequence]) -> None:
        """Append new blocks to the block tables. A sequence that is new in its row begins an empty table."""
        for scheduled in scheduled_seqs:
            if scheduled.sampling is not None:
                self.block_tables[scheduled.row] = []
            self.block_tables[scheduled.row].extend(scheduled.new_blocks)

    def flatten(self, scheduled_seqs: Sequence[ScheduledSequence]) -> RaggedArrays:
        """Lay the new tokens of all scheduled sequences end to end, with no padding.

        Sequence i brings its tokens `start` to `end = start + num_new_tokens`, where `scheduled = scheduled_seqs[i]`:

        - input_ids: `scheduled.token_ids`; positions: start, ..., end - 1;
        - slot_mapping: `self._slots(self.block_tables[scheduled.row], self._block_size, start, end)`;
        - query_start_loc: [0, n_0, n_0 + n_1, ...], so that sequence i's tokens are query_start_loc[i] to [i + 1];
        - logits_indices: the last token of each sequence, the only one whose logits are needed.

        All are int64, which torch takes as an index; `scheduled.token_ids` is int32.
        """
        ends = np.cumsum([scheduled.num_new_tokens for scheduled in scheduled_seqs])
        slots = [self._slots(self.block_tables[s.row], self._block_size, s.start, s.end) for s in scheduled_seqs]
        return RaggedArrays(
            input_ids=np.concatenate([scheduled.token_ids for scheduled in scheduled_seqs]).astype(np.int64),
            positions=np.concatenate([np.arange(scheduled.start, scheduled.end) for scheduled in scheduled_seqs]),
            slot_mapping=np.concatenate(slots),
            query_start_loc=np.concatenate([[0], ends]),
            logits_indices=ends - 1,
        )

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def padded_tables(tables: list[list[int]]) -> npt.NDArray[np.int32]:
    """Return block tables as one matrix [S, longest]. Short tables are padded with 0, which is never read."""
    width = max(map(len, tables))
    matrix = np.zeros((len(tables), width), np.int32)
    for row, table in zip(matrix, tables, strict=True):
        row[: len(table)] = table
    return matrix
