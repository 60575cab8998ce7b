"""M3's contract suite, run on the kernels' backends: interpreted here, on all of them and in half precision on a GPU."""

import pytest
import torch

from tests.contract import CASES, DEVICE, MIXED, Case, check, check_skips_slot_minus_one

HALF_CASES = [c for c in CASES if c.head_dim in (64, 128)] + [Case("D 64", MIXED, head_dim=64, block_size=256)]
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton(case: Case) -> None:
    check("triton", case, torch.float32 if case.block_size == 16 else torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_skips_slot_minus_one(dtype: torch.dtype) -> None:
    check_skips_slot_minus_one("triton", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["triton", "flash_attn"])
@pytest.mark.parametrize("case", HALF_CASES, ids=str)
def test_on_a_gpu(name: str, case: Case, dtype: torch.dtype) -> None:
    check(name, case, dtype, DEVICE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_in_half_precision_on_a_gpu(case: Case) -> None:
    check("triton", case, torch.bfloat16)
