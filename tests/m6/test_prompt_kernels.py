"""Kernels of a captured step with prompts, against their torch twins."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.worker.device_tables import DeviceTables
from tests.m4.cases import Paged, assert_close, starts
from tests.m6.devices import DEVICE

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.attention.backends.triton import TritonBackend
from folovllm.kernels.prefill import PrefillConfig, prefill
from folovllm.kernels.prefill_tiles import NOTHING, list_tiles
from folovllm.kernels.unpack_step import unpack_ragged
from folovllm.step.forward_batch import ForwardBatch


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_unpacking_in_one_kernel_is_unpacking_in_torch(block_size: int) -> None:
    """Decodes, one of them in flight, padding between, chunks, one of them long, and padding behind, which has tokens."""
    rng, rows, max_blocks = random.Random(block_size), 7, 700
    tables = DeviceTables(rows, max_blocks, block_size, torch.device("cpu"))
    tables.block_tables.random_(0, 500, generator=torch.Generator().manual_seed(1))
    tables.last_token.random_(0, 90, generator=torch.Generator().manual_seed(2))
    numbers = np.array([
        [*rng.sample(range(rows), 2), rows, rows, *rng.sample(range(rows), 3), rows, rows],
        [1, 5 * block_size, 0, 0, 600, block_size + 1, 2, 0, 0],
        [1, 1, 0, 0, 555, 2, 2, 0, 9],
    ], np.int32)  # fmt: skip
    tokens = np.arange(numbers[2].sum(), dtype=np.int32)
    tokens[1] = -1
    inputs = [torch.from_numpy(array) for array in (*numbers, tokens)]
    on_device = [tensor.to(DEVICE) for tensor in (*inputs, tables.block_tables, tables.last_token)]
    *flat, actual = (tensor.cpu() for tensor in unpack_ragged(*on_device, block_size))
    *wanted, expected = tables.unpack_ragged(*inputs)
    for one, other in zip(flat, wanted, strict=True):
        assert torch.equal(one, other)
    for row, table, length in zip(actual, expected, numbers[1], strict=True):
        blocks = -(-int(length) // block_size)
        assert torch.equal(row[:blocks], table[:blocks])


@pytest.mark.parametrize("lens", [[0], [1], [16], [17, 0, 5], [40, 16, 1, 0, 0, 70], [1] * 40])
@pytest.mark.parametrize("rest", [0, 1, 50])
def test_tiles_are_listed_once_each_and_padding_has_none(lens: list[int], rest: int) -> None:
    """After two decodes, which are not listed; the last sequence of length 0 has tokens that are nobody's."""
    query_lens, first = [1, 1, *lens, rest], 2
    seq_lens = torch.tensor([9, 9, *(n + 3 * (n > 0) for n in lens), 0], dtype=torch.int32, device=DEVICE)
    num_tokens = sum(lens) + rest
    found = list_tiles(starts(query_lens), seq_lens, num_tokens, first, 16).tolist()
    expected = [[first + i, row0] for i, n in enumerate(lens) for row0 in reversed(range(0, n, 16))]
    assert found[: len(expected)] == expected
    assert all(row0 == NOTHING.value for _, row0 in found[len(expected) :])


def test_prefill_by_a_list_reads_and_writes_what_is_listed() -> None:
    torch.manual_seed(0)
    lens, query_lens = [5, 20, 37, 0, 0], [5, 3, 20, 0, 12]
    paged = Paged.make(lens, 16, 1, 16)
    query = torch.randn(sum(query_lens), 2, 16, device=DEVICE)
    out = torch.full_like(query, -5.0)
    tiles = list_tiles(starts(query_lens), paged.seq_lens, len(query), 0, 16)
    prefill(query, paged.kv_cache, starts(query_lens), paged.seq_lens, paged.block_tables, len(query), 0.25, out,
            config=PrefillConfig(16, 16, 4, 2), tiles=tiles)  # fmt: skip
    assert_close(out[:28], paged.attention(query[:28], [*query_lens[:4], 0]))
    assert (out[28:] == -5).all(), "nobody's queries are left alone"


@pytest.mark.parametrize(("decodes", "chunks"), [
    ([9, 20], [(5, 13), (7, 7)]), ([], [(30, 33)]), ([3, 1, 40, 17], [(1, 1)]), ([5], [(1, 20)] * 3), ([33, 2], []),
])  # fmt: skip
def test_attention_of_a_padded_batch(decodes: list[int], chunks: list[tuple[int, int]]) -> None:
    """Room for four decodes, four prompts and 40 tokens. What no sequence owns is NaN, and its block numbers are wild."""
    torch.manual_seed(0)
    d, n, room, tokens = len(decodes), len(chunks), 4, 40
    lens = [*decodes, *[0] * (room - d), *(length for _, length in chunks), *[0] * (5 - n)]
    new = [1] * d + [q for q, _ in chunks]
    query_lens = [*[1] * d, *[0] * (room - d), *new[d:], *[0] * (4 - n), tokens - sum(new)]
    paged = Paged.make(lens, 16, 1, 16)
    query = torch.randn(tokens, 2, 16, device=DEVICE)
    nothing = torch.empty(tokens, dtype=torch.int64, device=DEVICE)
    batch = ForwardBatch(
        nothing, nothing, nothing, starts(query_lens), paged.seq_lens, paged.block_tables, nothing, num_seqs=room + 5,
        num_decodes=room, max_query_len=tokens, max_seq_len=64, query_lens_host=[], seq_lens_host=[], is_padded=True,
    )  # fmt: skip
    backend = TritonBackend(AttentionConfig(2, 1, 16, torch.float32, torch.device(DEVICE), 16, max_num_seqs=room))
    backend.plan(batch)
    found = backend.forward(query, paged.kv_cache, batch)
    real = [i for i, length in enumerate(lens) if length]
    own = replace(paged, seq_lens=paged.seq_lens[real], block_tables=paged.block_tables[real])
    assert_close(found[: sum(new)], own.attention(query[: sum(new)], new))
