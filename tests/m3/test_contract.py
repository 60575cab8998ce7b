"""Every backend of the milestones so far keeps the contract; tests/m4 runs the same suite on the backends that come later."""

import pytest
import torch

from tests.contract import CASES, MIXED, Case, check, check_skips_slot_minus_one

BACKENDS = ("torch_naive", "torch_paged")
BFLOAT16 = Case("decodes and prompts", MIXED, head_dim=64)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_float64(backend: str, case: Case) -> None:
    check(backend, case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(backend: str, dtype: torch.dtype) -> None:
    check(backend, BFLOAT16, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slot_minus_one_is_nowhere(backend: str) -> None:
    check_skips_slot_minus_one(backend)
