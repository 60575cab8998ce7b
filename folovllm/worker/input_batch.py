"""The tensors of one step: the only place that builds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.scheduler import ScheduledSequence
from folovllm.forward_batch import ForwardBatch

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class RaggedArrays:
    """What `ForwardBatch` says of each token, on the host: numpy arrays."""

    input_ids: Ints  # [T]
    positions: Ints  # [T]
    slot_mapping: Ints  # [T]
    query_start_loc: Ints  # [S+1]
    logits_indices: Ints  # [S]


class InputBatch:
    """Turns scheduled sequences into a `ForwardBatch` on the device."""

    def __init__(self, manager: type[KVCacheManager], block_size: int, device: torch.device) -> None:
        self._slots = manager.slots
        self._block_size = block_size
        self._device = device

    def build(self, items: list[ScheduledSequence]) -> ForwardBatch:
        """The device tensors of one step."""
        arrays = self.flatten(items)
        query_lens = [item.num_new_tokens for item in items]
        seq_lens = [item.start + item.num_new_tokens for item in items]
        return ForwardBatch(
            input_ids=self._tensor(arrays.input_ids),
            positions=self._tensor(arrays.positions),
            slot_mapping=self._tensor(arrays.slot_mapping),
            query_start_loc=self._tensor(arrays.query_start_loc.astype(np.int32)),
            seq_lens=self._tensor(np.array(seq_lens, np.int32)),
            block_tables=self._tensor(padded_tables([item.seq.block_table for item in items])),
            logits_indices=self._tensor(arrays.logits_indices),
            num_seqs=len(items),
            num_decodes=next((i for i, n in enumerate(query_lens) if n > 1), len(items)),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )

    def flatten(self, items: list[ScheduledSequence]) -> RaggedArrays:
        """Lay the new tokens of all items end to end, with no padding.

        Item i brings tokens `start` to `end = start + num_new_tokens` of its sequence:

        - input_ids: `seq.token_ids[start:end]`; positions: start, ..., end - 1;
        - slot_mapping: `self._slots(seq.block_table, self._block_size, start, end)`;
        - query_start_loc: [0, n_0, n_0 + n_1, ...], so that item i's tokens are query_start_loc[i] to [i + 1];
        - logits_indices: the last token of each item, the only one whose logits are needed.

        All are int64, which torch takes as an index; `seq.token_ids` is int32.
        """
        spans = [(item.seq, item.start, item.start + item.num_new_tokens) for item in items]
        ends = np.cumsum([item.num_new_tokens for item in items])
        return RaggedArrays(
            input_ids=np.concatenate([seq.token_ids[start:end] for seq, start, end in spans]).astype(np.int64),
            positions=np.concatenate([np.arange(start, end) for _, start, end in spans]),
            slot_mapping=np.concatenate(
                [self._slots(seq.block_table, self._block_size, start, end) for seq, start, end in spans]
            ),
            query_start_loc=np.concatenate([[0], ends]),
            logits_indices=ends - 1,
        )

    def _tensor(self, array: npt.NDArray[np.integer]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)


def padded_tables(tables: list[list[int]]) -> npt.NDArray[np.int32]:
    """Block tables as one matrix [S, longest], short ones filled up with 0, which nobody reads."""
    width = max(map(len, tables))
    matrix = np.zeros((len(tables), width), np.int32)
    for row, table in zip(matrix, tables, strict=True):
        row[: len(table)] = table
    return matrix
