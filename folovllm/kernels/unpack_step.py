"""The first kernel of a step: it unpacks the buffer into the tensors that the layers read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["stride_table"])
def unpack_decode_kernel(
    field_ptr, table_ptr, last_token_ptr, input_ptr, position_ptr, slot_ptr, batch_table_ptr, stride_table, max_blocks,
    TOKEN: tl.constexpr, ROW: tl.constexpr, SEQ_LEN: tl.constexpr, NEW_BLOCK: tl.constexpr, B: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (column i): token, position, slot and block table of sequence i; in torch it is `DeviceTables.unpack_decode`.

    `field_ptr` [fields, S] int32. It enters a new block into the row's table, and copies the row to the batch's tables.
    """
    i, count = tl.program_id(0), tl.num_programs(0)
    token = tl.load(field_ptr + TOKEN * count + i).to(tl.int64)
    row = tl.load(field_ptr + ROW * count + i).to(tl.int64)
    seq_len = tl.load(field_ptr + SEQ_LEN * count + i)
    new_block = tl.load(field_ptr + NEW_BLOCK * count + i)
    position = tl.maximum(seq_len - 1, 0)
    column = position // B
    table = table_ptr + row * stride_table
    block = tl.load(table + column)
    block = tl.where(new_block >= 0, new_block, block)
    tl.store(input_ptr + i, tl.where(token >= 0, token, tl.load(last_token_ptr + row)))
    tl.store(position_ptr + i, position.to(tl.int64))
    slot = block.to(tl.int64) * B + position % B
    tl.store(slot_ptr + i, tl.where(seq_len > 0, slot, -1))
    for start in range(0, column + 1, WIDTH):  # entries beyond the sequence are never read
        c = start + tl.arange(0, WIDTH)
        blocks = tl.load(table + c, mask=c <= column, other=0)
        blocks = tl.where(c == column, block, blocks)
        tl.store(batch_table_ptr + i.to(tl.int64) * max_blocks + c, blocks, mask=c <= column)
    tl.store(table + column, block)


def unpack_decode(
    fields: torch.Tensor,
    block_tables: torch.Tensor,
    last_token: torch.Tensor,
    block_size: int,
    lines: tuple[int, int, int, int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return input ids, positions and slots of a decode step, [S] int64 each, and block tables [S, max_blocks] int32.

    Args:
        fields: [fields, S] int32; `lines` are its lines for token, row, length and new block.
        block_tables: [rows, max_blocks] int32; new blocks are entered. last_token: [rows] int64.
    """
    width, max_blocks = fields.shape[1], block_tables.shape[1]
    input_ids, positions, slots = torch.empty(3, width, dtype=torch.int64, device=fields.device)
    tables = torch.empty(width, max_blocks, dtype=torch.int32, device=fields.device)
    token, row, seq_len, new_block = lines
    unpack_decode_kernel[(width,)](
        fields, block_tables, last_token, input_ids, positions, slots, tables, block_tables.stride(0), max_blocks,
        TOKEN=token, ROW=row, SEQ_LEN=seq_len, NEW_BLOCK=new_block, B=block_size, WIDTH=128, num_warps=1,
    )  # fmt: skip
    return input_ids, positions, slots, tables


@triton.jit(
    do_not_specialize=["stride_table", "max_blocks"],
    do_not_specialize_on_alignment=["row_ptr", "len_ptr", "query_len_ptr", "given_ptr", "input_ptr", "position_ptr",
                                    "slot_ptr"],
)  # fmt: skip
def unpack_ragged_kernel(
    row_ptr, len_ptr, query_len_ptr, given_ptr, table_ptr, last_token_ptr, input_ptr, position_ptr, slot_ptr, start_ptr,
    batch_table_ptr, stride_table, max_blocks, B: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Program (sequence, part): some stretches of its tokens and of its block table; in torch it is `DeviceTables.unpack_ragged`."""
    seq, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    i = tl.arange(0, WIDTH)
    start = 0
    for first in range(0, seq, WIDTH):
        start += tl.sum(tl.load(query_len_ptr + first + i, mask=first + i < seq, other=0))
    query_len, seq_len = tl.load(query_len_ptr + seq), tl.load(len_ptr + seq)
    if part == 0:
        tl.store(start_ptr + seq + 1, start + query_len)
        if seq == 0:
            tl.store(start_ptr, 0)
    row = tl.load(row_ptr + seq).to(tl.int64)
    table, newest = table_ptr + row * stride_table, tl.load(last_token_ptr + row)
    for first in range(part * WIDTH, query_len, num_parts * WIDTH):
        token = first + i
        inside, at = token < query_len, start + token
        position = tl.maximum(seq_len - query_len + token, 0)
        given = tl.load(given_ptr + at, mask=inside, other=0).to(tl.int64)
        block = tl.load(table + position // B, mask=inside, other=0).to(tl.int64)
        tl.store(input_ptr + at, tl.where(given >= 0, given, newest), mask=inside)
        tl.store(position_ptr + at, position.to(tl.int64), mask=inside)
        tl.store(slot_ptr + at, tl.where(seq_len > 0, block * B + position % B, -1), mask=inside)
    num_blocks = tl.cdiv(seq_len, B)
    for first in range(part * WIDTH, num_blocks, num_parts * WIDTH):  # entries beyond the sequence are never read
        c = first + i
        blocks = tl.load(table + c, mask=c < num_blocks, other=0)
        tl.store(batch_table_ptr + seq.to(tl.int64) * max_blocks + c, blocks, mask=c < num_blocks)


def unpack_ragged(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    tokens: torch.Tensor,
    block_tables: torch.Tensor,
    last_token: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    """Return the batch's tensors for sequences [S] with new tokens [T], all int32, like `DeviceTables.unpack_ragged`.

    Args:
        block_tables: [rows, max_blocks] int32. last_token: [rows] int64.

    Returns:
        Input ids, positions, slots, [T] int64 each; starts [S+1] and block tables [S, max_blocks], int32.
    """
    num_seqs, num_tokens, max_blocks, width = len(rows), len(tokens), block_tables.shape[1], 128
    input_ids, positions, slots = torch.empty(3, num_tokens, dtype=torch.int64, device=rows.device)
    starts = torch.empty(num_seqs + 1, dtype=torch.int32, device=rows.device)
    tables = torch.empty(num_seqs, max_blocks, dtype=torch.int32, device=rows.device)
    num_parts = min(32, triton.cdiv(num_tokens, 2 * width))
    unpack_ragged_kernel[(num_seqs, num_parts)](
        rows, seq_lens, query_lens, tokens, block_tables, last_token, input_ids, positions, slots, starts, tables,
        block_tables.stride(0), max_blocks, B=block_size, WIDTH=width, num_warps=1,
    )  # fmt: skip
    return input_ids, positions, slots, starts, tables
