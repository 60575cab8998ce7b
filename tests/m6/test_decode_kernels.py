"""Kernels that a captured decode step is made of, against their torch twins."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from folovllm.step.packed import NOTHING, Field
from folovllm.worker.device_tables import DeviceTables
from tests.m6.devices import DEVICE

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels.skinny_linear import is_supported, kernel_config, skinny_linear
from folovllm.kernels.unpack_step import unpack_decode


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same in float64, by torch."""
    normed = x.double() if norm_eps is None else F.rms_norm(x.double(), x.shape[1:], eps=norm_eps)
    y = F.linear(normed, weight.double())
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


OPTIONS: list[dict[str, Any]] = [{}, {"gated": True}, {"norm_eps": 1e-5}, {"norm_eps": 1e-5, "gated": True}]
SHAPES = [
    (1, 72, 8),
    (4, 512, 10),
    (2, 700, 3),
    (4, 1100, 20),
    (2, 1, 2),
    (1, 5, 9),
    (2, 513, 1),
]  # tokens, width, rows
IN_PAIRS = [(1, 2, 1), (4, 34, 7), (3, 514, 9), (1, 514, 9), (4, 1100, 5)]


class TestSmallLinear:
    @pytest.mark.parametrize(("shape", "dtype", "options"), [
        *((shape, torch.float32, options) for shape in SHAPES for options in OPTIONS),
        *((shape, dtype, OPTIONS[-1]) for shape in IN_PAIRS for dtype in (torch.float16, torch.bfloat16)),
    ], ids=str)  # fmt: skip
    def test_is_a_product(self, shape: tuple[int, int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
        """Rows of a larger tensor, with widths that fill no tile, added to a stream and not. The interpreter cuts bfloat16 off."""
        tokens, width, rows = shape
        generator = torch.Generator().manual_seed(width)
        x = (3 * torch.randn(tokens, width + 4, generator=generator)).to(DEVICE, dtype)[:, :width]
        weight = torch.randn(rows * (1 + options.get("gated", False)), width, generator=generator) / width**0.5
        weight, stream = weight.to(DEVICE, dtype), torch.randn(tokens, rows, generator=generator).to(DEVICE, dtype)
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
