"""Kernels that a captured decode step is made of, against their torch twins."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from folovllm.step.packed import NOTHING, Field
from folovllm.worker.device_tables import DeviceTables
from tests.m6.devices import DEVICE

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels.gumbel_max import TILE, gumbel_max
from folovllm.kernels.skinny_linear import serves, skinny_linear, tiling
from folovllm.kernels.unpack_step import unpack_decode


class TestSmallLinear:
    @pytest.mark.parametrize("tokens", [1, 2, 4])
    @pytest.mark.parametrize(("width", "rows"), [(72, 8), (512, 10), (700, 3), (1100, 20)])
    def test_is_a_matrix_product(self, tokens: int, width: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(width)
        x = torch.randn(tokens, width, generator=generator).to(DEVICE)
        weight = torch.randn(rows, width, generator=generator).to(DEVICE)
        expected = (x.double() @ weight.double().T).float()
        assert torch.allclose(skinny_linear(x, weight), expected, atol=1e-4, rtol=1e-5)

    @pytest.mark.parametrize("tokens", [1, 4])
    @pytest.mark.parametrize("rows", [3, 8, 20])
    def test_gated_is_the_layer_and_its_activation(self, tokens: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(tokens, 130, generator=generator).to(DEVICE)
        weight = 0.2 * torch.randn(2 * rows, 130, generator=generator).to(DEVICE)
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        assert torch.allclose(skinny_linear(x, weight, gated=True), F.silu(gate) * up, atol=1e-4, rtol=1e-4)

    @pytest.mark.parametrize("tokens", [1, 4])
    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("width", [64, 700])  # one tile of a row, and two
    def test_norm_before_and_sum_after(self, tokens: int, gated: bool, width: int) -> None:
        generator = torch.Generator().manual_seed(width)
        x = 3 * torch.randn(tokens, width, generator=generator).to(DEVICE)
        weight = 0.1 * torch.randn(20 * (1 + gated), width, generator=generator).to(DEVICE)
        stream = torch.randn(tokens, 20, generator=generator).to(DEVICE)
        before = stream.clone()
        y = F.linear(F.rms_norm(x.double(), (width,), eps=1e-5), weight.double())
        expected = stream + (F.silu(y[:, :20]) * y[:, 20:] if gated else y)
        actual = skinny_linear(x, weight, 1e-5, gated, stream)
        assert torch.allclose(actual, expected.float(), atol=1e-4, rtol=1e-4)
        assert torch.equal(stream, before)

    @pytest.mark.parametrize("scale", [0.0, 1e-18, 1e-4, 1e15])
    def test_norm_of_very_small_and_very_large_numbers(self, scale: float) -> None:
        generator = torch.Generator().manual_seed(0)
        x = scale * torch.randn(2, 33, generator=generator).to(DEVICE)
        weight = torch.randn(5, 33, generator=generator).to(DEVICE)
        expected = F.linear(F.rms_norm(x.double(), (33,), eps=1e-6), weight.double())
        assert torch.allclose(skinny_linear(x, weight, 1e-6).double(), expected, rtol=1e-4, atol=1e-5 * scale * 1e3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize(("width", "rows"), [(1, 2), (5, 9), (513, 1)])
    def test_no_size_is_too_odd(self, width: int, rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(2, width, generator=generator).to(DEVICE, dtype)
        weight = (0.3 * torch.randn(2 * rows, width, generator=generator)).to(DEVICE, dtype)
        y = F.linear(F.rms_norm(x.double(), (width,), eps=1e-6), weight.double())
        expected = F.silu(y[:, :rows]) * y[:, rows:]
        tol = 1e-5 if dtype == torch.float32 else 3e-3
        assert torch.allclose(skinny_linear(x, weight, 1e-6, gated=True).double(), expected, rtol=tol, atol=tol)

    def test_takes_rows_of_a_larger_tensor(self) -> None:
        x, weight = torch.randn(2, 100, device=DEVICE)[:, :64], torch.randn(8, 64, device=DEVICE)
        assert torch.allclose(skinny_linear(x, weight), x @ weight.T, atol=1e-4)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(("width", "rows"), [(2, 1), (34, 7), (514, 9), (1100, 5)])
    @pytest.mark.parametrize("tokens", [1, 3, 4])
    def test_pairs_of_numbers(self, tokens: int, width: int, rows: int, dtype: torch.dtype) -> None:
        """All that is done to a result, with widths that fill no tile. The interpreter cuts bfloat16 off, three times."""
        generator = torch.Generator().manual_seed(width)
        x = torch.randn(tokens, width, generator=generator).to(DEVICE, dtype)
        weight = (torch.randn(2 * rows, width, generator=generator) / width**0.5).to(DEVICE, dtype)
        stream = torch.randn(tokens, rows, generator=generator).to(DEVICE, dtype)
        y = F.linear(F.rms_norm(x.double(), (width,), eps=1e-6), weight.double())
        expected = stream + F.silu(y[:, :rows]) * y[:, rows:]
        actual = skinny_linear(x, weight, 1e-6, gated=True, residual=stream).double()
        assert (actual - expected).norm() <= (0.02 if dtype == torch.bfloat16 else 2e-3) * expected.norm()

    @pytest.mark.parametrize("first", [0, 1, 2])  # pairs begin at even places; elsewhere each number is read by itself
    @pytest.mark.parametrize("apart", [8, 9])
    def test_pairs_in_a_larger_tensor(self, first: int, apart: int) -> None:
        whole = torch.randn(3, apart, generator=torch.Generator().manual_seed(first)).to(DEVICE, torch.float16)
        x, weight = whole[:, first : first + 6], torch.randn(5, 6, device=DEVICE, dtype=torch.float16)
        assert torch.allclose(skinny_linear(x, weight), x @ weight.T, atol=1e-2)
        weight = torch.randn(5 * 6 + 2, device=DEVICE, dtype=torch.float16)[first:][:30].view(5, 6)
        assert torch.allclose(skinny_linear(x, weight), x @ weight.T, atol=1e-2)

    def test_writes_where_it_is_told(self) -> None:
        x, weight, out = torch.randn(2, 64, device=DEVICE), torch.randn(10, 64, device=DEVICE), torch.empty(4, 10)
        out = out.fill_(torch.nan).to(DEVICE)
        skinny_linear(x, weight, out=out[:2])
        assert torch.allclose(out[:2], x @ weight.T, atol=1e-4) and out[2:].isnan().all()

    def test_serves_few_tokens(self) -> None:
        """Four only where it is ahead of the library: not in a layer of Qwen3-8B, but in one of Qwen3-4B."""
        narrow, wide = torch.empty(2560, 9728, device="meta"), torch.empty(24576, 4096, device="meta")
        assert [n for n in range(10) if serves(n, narrow)] == [1, 2, 4]
        assert [n for n in range(10) if serves(n, wide)] == [1, 2]

    @pytest.mark.parametrize("tokens", [1, 2, 4])
    @pytest.mark.parametrize("num_rows", [10, 151936])
    def test_a_tile_is_small_enough_for_registers(self, tokens: int, num_rows: int) -> None:
        """Of rows of up to 40,960 numbers in 16 bits, or half as many gated."""
        for row_bytes in [2, 100, *range(1024, 81_921, 1024)]:
            warps, rows, chunk = tiling(tokens, num_rows, row_bytes)
            assert rows * row_bytes <= warps * 32 * 4 * 80 and warps <= 16 and chunk <= warps * 32 * 4

    @pytest.mark.gpu
    @pytest.mark.parametrize(("width", "rows", "gated"), [(1024, 4096, False), (3072, 1024, False), (1024, 6144, True)])
    def test_in_bfloat16_as_accurate_as_the_library(self, width: int, rows: int, gated: bool) -> None:
        x = torch.randn(2, width, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) * 0.03

        def compute(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            y = F.linear(a, b)
            return F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1] if gated else y

        truth = compute(x.double(), weight.double())
        ours, theirs = (
            (y.double() - truth).norm() for y in (skinny_linear(x, weight, gated=gated), compute(x, weight))
        )
        assert ours <= 1.2 * theirs


class TestGumbelMaxKeeps:
    def test_tokens_in_their_rows(self) -> None:
        """In the order of `rows`, padding's row as often as there is padding; other rows stay, and so does the rest of `out`."""
        logits = torch.zeros(4, 300, device=DEVICE)
        logits[torch.arange(4), torch.tensor([11, 22, 33, 44])] = 1.0
        rows = torch.tensor([5, 0, 6, 6], dtype=torch.int32, device=DEVICE)
        last, out = torch.full((7,), -7, device=DEVICE), torch.full((6,), -7, device=DEVICE)
        zero = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        tokens = gumbel_max(logits, zero.float(), zero, zero, zero, out=out, keep=(last, rows))
        assert tokens.tolist() == [11, 22, 33, 44] and out.tolist() == [11, 22, 33, 44, -7, -7]
        assert last[:6].tolist() == [22, -7, -7, -7, -7, 11] and last[6] in (33, 44)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("vocab_size", [300, TILE, TILE + 1])
    def test_nothing_that_is_no_token(self, temperature: float, vocab_size: int) -> None:
        """What is drawn is looked up in the embedding next: an id beyond it would end the engine on a GPU."""
        logits = torch.full((4, vocab_size), torch.nan, device=DEVICE)
        logits[1, 200:] = -torch.inf
        logits[2] = -torch.inf
        logits[3] = torch.inf
        zero = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        tokens = gumbel_max(logits, torch.full((4,), temperature, device=DEVICE), zero, zero, zero, offset=40)
        assert all(40 <= token < 40 + vocab_size for token in tokens.tolist())
        assert tokens[[0, 2, 3]].tolist() == [40] * 3


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_unpacking_in_one_kernel_is_unpacking_in_torch(block_size: int) -> None:
    rng, rows, width, max_blocks = random.Random(block_size), 7, 6, 160
    tables = DeviceTables(rows, max_blocks, block_size, torch.device("cpu"))
    tables.block_tables.random_(0, 500, generator=torch.Generator().manual_seed(1))
    tables.last_token.random_(0, 90, generator=torch.Generator().manual_seed(2))
    fields = np.zeros((len(Field), width), np.int32)
    fields[Field.ROW] = [*rng.sample(range(rows), 4), rows, rows]
    fields[Field.SEQ_LEN] = [1, block_size, block_size + 1, 150 * block_size, 0, 0]
    fields[Field.TOKEN] = [-1, 5, -1, 7, 0, 0]
    fields[Field.NEW_BLOCK] = [NOTHING, 300, 301, NOTHING, NOTHING, NOTHING]
    before = tables.block_tables.clone().to(DEVICE)
    lines = (int(Field.TOKEN), int(Field.ROW), int(Field.SEQ_LEN), int(Field.NEW_BLOCK))
    ids, positions, slots, batch_tables = unpack_decode(
        torch.from_numpy(fields).to(DEVICE), before, tables.last_token.to(DEVICE), block_size, lines
    )
    expected = tables.unpack_decode(torch.from_numpy(fields), max_blocks * block_size)
    assert torch.equal(ids.cpu(), expected.input_ids) and torch.equal(positions.cpu(), expected.positions)
    assert torch.equal(slots.cpu(), expected.slot_mapping) and torch.equal(before.cpu(), tables.block_tables)
    for row, wanted, length in zip(batch_tables.cpu(), expected.block_tables, fields[Field.SEQ_LEN], strict=True):
        blocks = -(-int(length) // block_size)
        assert torch.equal(row[:blocks], wanted[:blocks])
