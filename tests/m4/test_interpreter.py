"""The interpreter of these tests sees what a GPU would punish: memory that is no argument's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.conftest import CUDA

pytestmark = pytest.mark.skipif(CUDA, reason="a GPU has no interpreter")


@triton.jit
def copy(target, source, NUM: tl.constexpr, MASKED: tl.constexpr):
    at = tl.arange(0, 16)
    kept = at < NUM if MASKED else at < 16
    tl.store(target + at, tl.load(source + at, mask=kept), mask=at < NUM)


def test_a_load_behind_the_end() -> None:
    source, target = torch.arange(10.0), torch.zeros(10)
    copy[(1,)](target, source, NUM=10, MASKED=True)
    assert target.equal(source)
    with pytest.raises(
        Exception, match="6 of 16 addresses lie outside the arguments of the kernel, the first one 0 bytes"
    ):
        copy[(1,)](target, source, NUM=10, MASKED=False)


def test_a_store_behind_the_end() -> None:
    with pytest.raises(Exception, match="3 of 13 addresses lie outside"):
        copy[(1,)](torch.zeros(10), torch.arange(13.0), NUM=13, MASKED=True)
