"""Kernels that a captured step is made of, against their torch twins."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.step.packed import NOTHING, Field
from folovllm.worker.device_tables import DeviceTables
from tests.contract import DEVICE
from tests.m4.cases import Paged, assert_close, starts

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.attention.backends.triton import TritonBackend
from folovllm.kernels.prefill import PrefillConfig, prefill
from folovllm.kernels.prefill_tiles import NOTHING as NO_TILE
from folovllm.kernels.prefill_tiles import list_tiles
from folovllm.kernels.skinny_linear import is_supported, kernel_config, skinny_linear
from folovllm.kernels.unpack_step import unpack_decode, unpack_ragged
from folovllm.step.forward_batch import ForwardBatch


def product(
    x: torch.Tensor, weight: torch.Tensor, norm_eps: float | None = None, gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The same in float64, by torch."""
    normed = x.double() if norm_eps is None else F.rms_norm(x.double(), x.shape[1:], eps=norm_eps)
    y = F.linear(normed, weight.double())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


OPTIONS: list[dict[str, Any]] = [{}, {"gated": True}, {"norm_eps": 1e-5}, {"norm_eps": 1e-5, "gated": True}]
# tokens, width, rows
SHAPES = [(1, 72, 8), (4, 512, 10), (2, 700, 3), (4, 1100, 20), (2, 1, 2), (1, 5, 9), (2, 513, 1)]
IN_PAIRS = [(1, 2, 1), (4, 34, 7), (3, 514, 9), (1, 514, 9), (4, 1100, 5)]


class TestSmallLinear:
    @pytest.mark.parametrize(("shape", "dtype", "options"), [
        *((shape, torch.float32, options) for shape in SHAPES for options in OPTIONS),
        *((shape, dtype, OPTIONS[-1]) for shape in IN_PAIRS for dtype in (torch.float16, torch.bfloat16)),
    ], ids=str)  # fmt: skip
    def test_is_a_product(self, shape: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
        """Rows of a larger tensor, with widths that fill no tile, added to a stream and not. The interpreter cuts bfloat16 off."""
        tokens, width, rows = shape
        x = (3 * torch.randn(tokens, width + 4)).to(DEVICE, dtype)[:, :width]
        weight = torch.randn(rows * (1 + options.get("gated", False)), width) / width**0.5
        weight, stream = weight.to(DEVICE, dtype), torch.randn(tokens, rows).to(DEVICE, dtype)
        before, most = stream.clone(), {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.02}[dtype]
        for residual in (None, stream):
            expected = product(x, weight, residual=residual, **options)
            actual = skinny_linear(x, weight, residual=residual, **options).double()
            assert (actual - expected).norm() <= most * expected.norm()
        assert torch.equal(stream, before)

    @pytest.mark.parametrize("first", [0, 1, 2])  # pairs begin at even places; elsewhere each number is read by itself
    @pytest.mark.parametrize("apart", [8, 9])
    def test_pairs_in_a_larger_tensor(self, first: int, apart: int) -> None:
        whole = torch.randn(3, apart, generator=torch.Generator().manual_seed(first)).to(DEVICE, torch.float16)
        x, weight = whole[:, first : first + 6], torch.randn(5, 6, device=DEVICE, dtype=torch.float16)
        assert torch.allclose(skinny_linear(x, weight), x @ weight.T, atol=1e-2)
        weight = torch.randn(5 * 6 + 2, device=DEVICE, dtype=torch.float16)[first:][:30].view(5, 6)
        assert torch.allclose(skinny_linear(x, weight), x @ weight.T, atol=1e-2)

    def test_serves_few_tokens(self) -> None:
        """Four only where it is ahead of the library: not in a layer of Qwen3-8B, but in one of Qwen3-4B."""
        narrow, wide = torch.empty(2560, 9728, device="meta"), torch.empty(24576, 4096, device="meta")
        assert [n for n in range(10) if is_supported(n, narrow)] == [1, 2, 4]
        assert [n for n in range(10) if is_supported(n, wide)] == [1, 2]

    @pytest.mark.parametrize("tokens", [1, 2, 4])
    @pytest.mark.parametrize("num_rows", [10, 151936])
    def test_a_tile_is_small_enough_for_registers(self, tokens: int, num_rows: int) -> None:
        """Of rows of up to 40,960 numbers in 16 bits, or half as many gated."""
        for row_bytes in [2, 100, *range(1024, 81_921, 1024)]:
            warps, rows, chunk = kernel_config(tokens, num_rows, row_bytes)
            assert rows * row_bytes <= warps * 32 * 4 * 80 and warps <= 16 and chunk <= warps * 32 * 4

    @pytest.mark.gpu
    @pytest.mark.parametrize(("width", "rows", "gated"), [(1024, 4096, False), (3072, 1024, False), (1024, 6144, True)])
    def test_in_bfloat16_as_accurate_as_the_library(self, width: int, rows: int, gated: bool) -> None:
        x = torch.randn(2, width, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * 0.03

        gate, up = F.linear(x, weight).chunk(2, -1) if gated else (None, F.linear(x, weight))
        library = up if gate is None else F.silu(gate) * up
        truth = product(x, weight, gated=gated)
        ours, theirs = ((y.double() - truth).norm() for y in (skinny_linear(x, weight, gated=gated), library))
        assert ours <= 1.2 * theirs


def filled(rows: int, max_blocks: int, block_size: int) -> DeviceTables:
    """Tables of random blocks, and random last tokens."""
    tables = DeviceTables(rows, max_blocks, block_size, torch.device("cpu"))
    tables.block_tables.random_(0, 500, generator=torch.Generator().manual_seed(1))
    tables.last_token.random_(0, 90, generator=torch.Generator().manual_seed(2))
    return tables


def assert_same_blocks(actual: torch.Tensor, expected: torch.Tensor, lengths: Any, block_size: int) -> None:
    """As far as the sequences have tokens."""
    for row, wanted, length in zip(actual.cpu(), expected, lengths, strict=True):
        blocks = -(-int(length) // block_size)
        assert torch.equal(row[:blocks], wanted[:blocks])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_unpacking_decodes_in_one_kernel_is_unpacking_in_torch(block_size: int) -> None:
    rng, rows, width, max_blocks = random.Random(block_size), 7, 6, 160
    tables = filled(rows, max_blocks, block_size)
    fields = np.zeros((len(Field), width), np.int32)
    fields[Field.ROW] = [*rng.sample(range(rows), 4), rows, rows]
    fields[Field.SEQ_LEN] = [1, block_size, block_size + 1, 150 * block_size, 0, 0]
    fields[Field.TOKEN] = [-1, 5, -1, 7, 0, 0]
    fields[Field.NEW_BLOCK] = [NOTHING, 300, 301, NOTHING, NOTHING, NOTHING]
    before = tables.block_tables.clone().to(DEVICE)
    lines = (int(Field.TOKEN), int(Field.ROW), int(Field.SEQ_LEN), int(Field.NEW_BLOCK))
    given = torch.from_numpy(fields).to(DEVICE), before, tables.last_token.to(DEVICE)
    ids, positions, slots, batch_tables = unpack_decode(*given, block_size, lines)
    expected = tables.unpack_decode(torch.from_numpy(fields), max_blocks * block_size)
    assert torch.equal(ids.cpu(), expected.input_ids) and torch.equal(positions.cpu(), expected.positions)
    assert torch.equal(slots.cpu(), expected.slot_mapping) and torch.equal(before.cpu(), tables.block_tables)
    assert_same_blocks(batch_tables, expected.block_tables, fields[Field.SEQ_LEN], block_size)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_unpacking_prompts_in_one_kernel_is_unpacking_in_torch(block_size: int) -> None:
    """Decodes, one of them in flight, padding between, chunks, one of them long, and padding behind, which has tokens."""
    rng, rows = random.Random(block_size), 7
    tables = filled(rows, 700, block_size)
    numbers = np.array([
        [*rng.sample(range(rows), 2), rows, rows, *rng.sample(range(rows), 3), rows, rows],
        [1, 5 * block_size, 0, 0, 600, block_size + 1, 2, 0, 0],
        [1, 1, 0, 0, 555, 2, 2, 0, 9],
    ], np.int32)  # fmt: skip
    tokens = np.arange(numbers[2].sum(), dtype=np.int32)
    tokens[1] = -1
    inputs = [torch.from_numpy(array) for array in (*numbers, tokens)]
    on_device = [tensor.to(DEVICE) for tensor in (*inputs, tables.block_tables, tables.last_token)]
    *flat, actual = unpack_ragged(*on_device, block_size)
    *wanted, expected = tables.unpack_ragged(*inputs)
    for one, other in zip(flat, wanted, strict=True):
        assert torch.equal(one.cpu(), other)
    assert_same_blocks(actual, expected, numbers[1], block_size)


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
    assert all(row0 == NO_TILE.value for _, row0 in found[len(expected) :])


def test_prefill_by_a_list_reads_and_writes_what_is_listed() -> None:
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
