"""The tables that a device keeps from step to step, and the unpacking of packed steps."""

from __future__ import annotations

import torch

from folovllm.engine.setup import EngineSetup
from folovllm.sample.sampler_state import SamplerState
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.packed import IN_FLIGHT, NOTHING, Field, Parts, Sample
from folovllm.step.schedule import Int32
from folovllm.worker.kv_memory import free_memory


def require_memory_of_rows(setup: EngineSetup, num_samples: int) -> None:
    """Raise ValueError if the free memory does not hold the tables of rows and the logits of the most samples of a step.

    They are made on no device and counted. Where far more than they can take is free, nothing is counted.
    """
    rows, vocab_size, free = setup.max_num_seqs, setup.vocab_size, free_memory(setup.device)
    if 64 * max(rows, num_samples) * (vocab_size + setup.max_model_len + 4096) < free:
        return
    nowhere = torch.device("meta")
    kernels, blocks = setup.device.type == "cuda", -(-setup.max_model_len // setup.block_size)
    num_bytes = SamplerState(rows, vocab_size, nowhere, max_samples=num_samples, use_kernels=kernels).num_bytes
    num_bytes += DeviceTables(rows, blocks, setup.block_size, nowhere).block_tables.nbytes
    num_bytes += rows * -(-vocab_size // setup.config.tensor_parallel_size) * setup.dtype.itemsize
    if num_bytes > free:
        raise ValueError(
            f"the tables of {rows:,} sequences take {num_bytes:,} bytes, and there are {free:,}: lower max_num_seqs"
        )


class DeviceTables:
    """Block tables and last tokens by row, on the device. The last row is for padding."""

    def __init__(self, num_rows: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self.block_tables = torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self._block_size = block_size
        self._counting = torch.arange(num_rows + 1, dtype=torch.int32, device=device)

    def unpack_decode(self, fields: torch.Tensor, max_seq_len: int) -> ForwardBatch:
        """Return the batch of a padded decode step, from `fields` [len(Field), width] on the device. Device work only.

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
            rows=fields[Field.ROW],
            is_disjoint=True,  # only the first step of a sequence can read what others write, and this is a later one
        )

    def _unpack(self, fields: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return input ids, positions and slots [S], and block tables [S, max_blocks]. It also enters the new blocks."""
        if fields.is_cuda:  # one kernel instead of a dozen
            from folovllm.kernels.unpack_step import unpack_decode

            lines = (int(Field.TOKEN), int(Field.ROW), int(Field.SEQ_LEN), int(Field.NEW_BLOCK))
            return unpack_decode(fields, self.block_tables, self.last_token, self._block_size, lines)
        rows, seq_lens, new_block = fields[Field.ROW].long(), fields[Field.SEQ_LEN], fields[Field.NEW_BLOCK]
        positions = (seq_lens - 1).clamp(min=0).long()
        column = positions // self._block_size
        blocks = torch.where(new_block == NOTHING, self.block_tables[rows, column], new_block)
        self.block_tables[rows, column] = blocks
        slots = blocks.long() * self._block_size + positions % self._block_size
        given = fields[Field.TOKEN].long()
        input_ids = torch.where(given == IN_FLIGHT, self.last_token[rows], given)
        return input_ids, positions, torch.where(seq_lens > 0, slots, -1), self.block_tables[rows]

    def enter_blocks(self, updates: torch.Tensor) -> None:
        """Write a step's new entries [3, U] to `block_tables`. Device work only."""
        row, column, block = updates
        self.block_tables[row.long(), column.long()] = block

    def unpack(
        self, parts: Parts[torch.Tensor], num_decodes: int, max_query_len: int, max_seq_len: int, host: Int32 | None
    ) -> ForwardBatch:
        """Return the batch of a step that is no decode step, from its parts on the device. Device work only.

        Its new blocks must have been entered. `host`: the same fields in host memory, or None while a step is captured, because
        they change from replay to replay.
        """
        rows, seq_lens, query_lens = (parts.fields[f] for f in (Field.ROW, Field.SEQ_LEN, Field.QUERY_LEN))
        input_ids, positions, slots, starts, tables = self.unpack_ragged(rows, seq_lens, query_lens, parts.tokens)
        if host is None and rows.device.type == "cpu":
            host = parts.fields.numpy()
        return ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slot_mapping=slots,
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=tables,
            logits_indices=parts.samples[Sample.AFTER],
            num_seqs=len(rows),
            num_decodes=num_decodes,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            query_lens_host=[] if host is None else host[Field.QUERY_LEN].tolist(),
            seq_lens_host=[] if host is None else host[Field.SEQ_LEN].tolist(),
            rows=rows,
        )

    def unpack_ragged(
        self, rows: torch.Tensor, seq_lens: torch.Tensor, query_lens: torch.Tensor, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the batch's tensors for sequences [S] with new tokens [T], all int32. Device work only.

        The new tokens of a sequence of length 0 are padding: position 0, slot -1.

        Returns:
            Input ids, positions, slots [T], where each sequence's tokens start [S+1], block tables [S, max_blocks].
        """
        if rows.is_cuda:  # one kernel instead of two dozen
            from folovllm.kernels.unpack_step import unpack_ragged

            return unpack_ragged(
                rows, seq_lens, query_lens, tokens, self.block_tables, self.last_token, self._block_size
            )
        ends, count = query_lens.cumsum(0), len(tokens)
        which = torch.repeat_interleave(torch.arange(len(rows)), query_lens, output_size=count)
        is_real = seq_lens[which] > 0
        positions = torch.where(is_real, torch.arange(count) + (seq_lens - ends)[which], 0)
        tables = self.block_tables[rows.long()]
        slots = tables[which, positions // self._block_size].long() * self._block_size + positions % self._block_size
        input_ids = torch.where(tokens == IN_FLIGHT, self.last_token[rows.long()[which]], tokens)
        starts = torch.nn.functional.pad(ends, (1, 0)).int()
        return input_ids, positions, torch.where(is_real, slots, -1), starts, tables
