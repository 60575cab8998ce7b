"""The first kernel of a recorded decode step: from the packed buffer to everything that the layers read."""

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
    """Program (column i): token, position, slot and block table of sequence i; `DeviceTables.unpack_decode` in torch.

    `field_ptr` [fields, S] int32. A new block is entered into the row's table, and the row copied to the batch's.
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
    """Input ids [S], positions [S] and slots [S], all int64, and block tables [S, max_blocks] int32 of a decode step.

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
