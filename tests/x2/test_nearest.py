"""Rounding to 8 bits, by hand."""

from __future__ import annotations

import pytest
import torch

from folovllm.electives.quantization.quantizer.methods import FP8, round_channels


def test_int8_by_hand() -> None:
    codes, scale = round_channels(torch.tensor([[-2.54, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.int8, torch.float32)
    assert codes.tolist() == [[-127, 50, 0], [0, 0, 0]] and scale[:, 0].tolist() == pytest.approx([0.02, 1.0])


def test_a_scale_for_each_output_reaches_the_end_of_fp8() -> None:
    codes, scale = round_channels(torch.tensor([[448.0, 17.0], [1.0, -0.5]]), FP8, torch.float32)
    assert codes.float().tolist() == [[448.0, 16.0], [448.0, -224.0]], "17 lies between 16 and 18: half goes to even"
    assert scale[:, 0].tolist() == pytest.approx([1.0, 1 / 448])


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_scale_that_was_rounded_down_overflows_nothing(scale_dtype: torch.dtype) -> None:
    w = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 0.02
    for to, error in ((torch.int8, 1 / 127), (FP8, 1 / 14)):
        codes, scale = round_channels(w, to, scale_dtype)
        assert scale.dtype == scale_dtype and codes.float().isfinite().all()
        off = (codes.float() * scale.float() - w).abs().amax(1) / w.abs().amax(1)
        assert off.max() < error
