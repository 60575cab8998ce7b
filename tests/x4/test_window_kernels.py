"""Sliding windows in every backend, over blocks that hold somebody else's NaN as soon as no token sees them."""

from __future__ import annotations

import pytest
import torch

from tests.contract import PAGED, Case, check

SEQS = ((7, 1), (16, 1), (40, 1), (99, 1), (0, 5), (3, 37), (19, 4), (70, 50))  # decodes first; chunks in the middle
CASES = (
    *(Case(f"window {window}", SEQS, window=window) for window in (1, 16, 17, 45)),
    Case("one that nobody reaches", SEQS, window=500),
    Case("blocks of 4", SEQS, block_size=4, window=9),
    Case("blocks of 256", ((300, 1), (290, 30)), block_size=256, window=33),
    Case("a decode in many chunks", ((400, 1),), block_size=4, window=201),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", [*PAGED, "torch_paged,torch_naive"])
def test_a_token_sees_its_window_and_nothing_before_it(name: str, case: Case) -> None:
    check(name, case)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*PAGED, "flash_attn,triton"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_on_a_gpu(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """Gemma's heads of 256 dimensions too; sequences of many tiles, so that all kinds of tiles occur."""
    seqs = ((5, 1), (1500, 1), (4000, 1), (0, 700), (1000, 1300))
    for window in (512, 1000):
        check(name, Case("long", seqs, 8, 2, head_dim, window=window), dtype)
