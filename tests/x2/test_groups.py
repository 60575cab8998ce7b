"""Groups of numbers as codes, and outputs as codes of 8 bits: by hand, and how far a number may move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.electives.quantization.layouts import E4M3 as FP8
from folovllm.electives.quantization.quantizer.groups import (
    dequantize_groups,
    find_scales,
    quantize_groups,
    round_to_codes,
)
from folovllm.electives.quantization.weight import round_channels
from tests.tiny import worked_case

SLACK = {torch.float32: 1e-4, torch.float16: 0.13, torch.bfloat16: 1.01}  # steps: up to 2 ** 8 of a rounded scale


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class TestGroups:
    def test_a_worked_case(self) -> None:
        """Two groups of three numbers, codes of three bits: 0 to 7."""
        w = torch.tensor([[-1.0, 0.6, 2.5, 0.5, 1.75, 0.75]])
        codes, scales, zeros = quantize_groups(w, bits=3, group_size=3, symmetric=False)
        got = {"codes": codes, "scales": scales, "zeros": zeros, "back": dequantize_groups(codes, scales, zeros)}
        says = (
            "7 steps from -1 to 2.5 are 0.5 each, and -1 is two of them below zero: 2 is zero. 0.6 is 1.2 steps, so 1, and code 3. "
            "The second group reaches from 0, not from 0.5, to 1.75: steps of 0.25, and 0 is zero"
        )
        expected = {
            "codes": [[0, 3, 7, 2, 7, 3]],
            "scales": [[0.5, 0.25]],
            "zeros": [[2, 0]],
            "back": [[-1.0, 0.5, 2.5, 0.5, 1.75, 0.75]],
        }
        worked_case("x2.1", got, expected, says)

    def test_a_worked_case_of_a_symmetric_range(self) -> None:
        """Zero is 4 in every group, so there are four steps below it and three above."""
        w = torch.tensor([[-1.4, 0.9, 3.5, -7.0, 1.0, 2.0]])
        codes, scales, zeros = quantize_groups(w, bits=3, group_size=3, symmetric=True)
        got = {"codes": codes, "scales": scales, "zeros": zeros, "back": dequantize_groups(codes, scales, zeros)}
        says = (
            "7 steps from -3.5 to 3.5 are 1 each. -1.4 is one below zero, code 3. 3.5 would be the 4th step above zero, code 8: "
            "there is none, so it becomes 7, which is 3. The second group's steps are 2, and 1 is half of one: to even, 0"
        )
        expected = {
            "codes": [[3, 5, 7, 0, 4, 5]],
            "scales": [[1.0, 2.0]],
            "zeros": [[4, 4]],
            "back": [[-1.0, 1.0, 3.0, -8.0, 0.0, 2.0]],
        }
        worked_case("x2.1 symmetric", got, expected, says)

    @settings(max_examples=12)
    @given(st.integers(2, 8), st.booleans(), st.sampled_from(list(SLACK)))
    def test_no_number_moves_by_more_than_half_a_step(self, bits: int, symmetric: bool, dtype: torch.dtype) -> None:
        """But for the largest of a symmetric range and what a scale's own rounding adds."""
        w = seeded(6, 64, seed=bits).to(dtype)
        w[0, :5] = 0
        before = w.clone()
        codes, scales, zeros = quantize_groups(w, bits, 16, symmetric)
        assert torch.equal(w, before), "`w` has been changed, and the caller still needs it: work on a copy"
        assert codes.dtype == zeros.dtype == torch.uint8, "codes and zeros are bytes"
        assert int(codes.max()) < 2**bits, f"a code of {int(codes.max())} has more than {bits} bits"
        assert scales.dtype == dtype, f"scales are kept in w's dtype, {dtype}, not {scales.dtype}"
        back = dequantize_groups(codes, scales.float(), zeros)
        moved = (back - w.float()).abs() / scales.repeat_interleave(16, 1).float()
        assert (moved <= 0.5 + SLACK[dtype]).all(), f"a number moved by {float(moved.max()):.2f} steps"
        assert (moved[0, :5] == 0).all(), "zero stays exactly zero"

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_codes_fit_the_scale_that_is_kept(self, dtype: torch.dtype) -> None:
        """In 16 bits a scale is rounded; zeros and codes are chosen with what it has become."""
        w = seeded(64, 32).to(dtype)
        codes, scales, zeros = quantize_groups(w, 8, 32, symmetric=False)
        step = scales.float()
        assert torch.equal(zeros.float(), (-w.float().amin(1, keepdim=True) / step).round()), (
            "a zero is a code, too: it counts steps of the scale of 16 bits, from the low end to 0"
        )
        missed = ((w.float() / step + zeros).clamp(0, 255) - codes).abs()  # half a step may be rounded either way
        assert (missed < 0.5001).all(), "codes belong to the scale of 16 bits, which is all that is stored"

    def test_a_range_is_found_in_32_bits(self) -> None:
        """From -60,000 to 60,000 is more than float16 can say; a step of it is not."""
        scales, _ = find_scales(torch.tensor([[-60000.0, 60000.0]]).half(), 4, 2, symmetric=False)
        assert scales.tolist() == [[8000.0]], "15 steps of 8,000: only the step is rounded to w's dtype"

    def test_a_group_below_zero(self) -> None:
        scales, zeros = find_scales(torch.tensor([[-1.75, -0.5]]), 3, 2, symmetric=False)
        got = scales.item(), zeros.item()
        assert got == (0.25, 7), f"a range holds 0: 7 steps from -1.75 to 0, not to -0.5, and 0 is code 7; yours: {got}"

    def test_a_step_is_a_multiple_of_the_smallest_number(self) -> None:
        """Float16 counts in 2 ** -24. 15 steps from -22 of these to 0 would be 1.47 of them, from -4 of them 0.27."""
        w = torch.tensor([[-22.0, 0.0, -4.0, 0.0]]) * 2.0**-24
        scales, zeros = find_scales(w.half(), 4, 2, symmetric=False)
        assert (scales > 0).all(), (
            "0.27 is rounded to a scale of 0, and something is divided by it: look at what is kept"
        )
        assert zeros[0, 0] == 15, (
            f"a zero is a code of 4 bits, 15 at most; with a step of 2 ** -24 yours is {zeros[0, 0]}"
        )

    def test_a_group_of_zeros(self) -> None:
        codes, scales, zeros = quantize_groups(torch.zeros(2, 8), 4, 4, symmetric=False)
        assert (scales > 0).all(), "a scale is never 0, for numbers are divided by it, also where all are 0"
        assert not dequantize_groups(codes, scales, zeros).any(), "and they come back as zeros"

    def test_each_output_and_each_group_has_its_own(self) -> None:
        w = seeded(3, 8)
        scales, zeros = find_scales(w, 4, 4, symmetric=False)
        for row in range(3):
            for group in range(2):
                own = find_scales(w[row : row + 1, 4 * group : 4 * group + 4], 4, 4, symmetric=False)
                pair = scales[row, group], zeros[row, group]
                assert pair == (own[0][0, 0], own[1][0, 0]), f"group {group} of output {row} depends on others"

    def test_given_scales_are_used(self) -> None:
        """GPTQ rounds with scales that it found elsewhere."""
        w, scales = torch.tensor([[0.5, 9.0, -9.0, 0.5]]), torch.tensor([[0.5, 0.25]])
        codes = round_to_codes(w, scales, torch.tensor([[1, 8]], dtype=torch.uint8), bits=4)
        assert codes.tolist() == [[2, 15, 0, 10]], "one step above 1; far beyond the ends; two steps above 8"

    def test_what_comes_back_is_rounded_once(self) -> None:
        codes, zeros = torch.tensor([[255, 0]], dtype=torch.uint8), torch.tensor([[3]], dtype=torch.uint8)
        scales = torch.tensor([[1.0]]).bfloat16()
        back = dequantize_groups(codes, scales, zeros)
        assert back.dtype == torch.bfloat16, f"numbers come back in the dtype of the scales, not {back.dtype}"
        assert back.tolist() == [[252.0, -3.0]], "code - zero is a whole number below 0 as well, and exact"
        back = dequantize_groups(codes, torch.tensor([[1.09375]]).bfloat16(), torch.full_like(zeros, 100))
        assert back.tolist() == [[170.0, -109.5]], (
            "155 * 1.09375, rounded once; not the difference of two rounded products"
        )

    def test_a_group_size_that_does_not_divide_is_refused(self) -> None:
        with pytest.raises(ValueError, match="groups of 24 do not divide 64 inputs"):
            find_scales(torch.zeros(2, 64), 4, 24, True)


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_of_8_bits_have_a_scale_for_each_output(scale_dtype: torch.dtype) -> None:
    """By hand; and a scale that was rounded down overflows nothing."""
    codes, scale = round_channels(torch.tensor([[-2.54, 1.0, 0.0], [0.0, 0.0, 0.0]]), torch.int8, torch.float32)
    assert codes.tolist() == [[-127, 50, 0], [0, 0, 0]] and scale[:, 0].tolist() == pytest.approx([0.02, 1.0])
    codes, scale = round_channels(torch.tensor([[448.0, 17.0], [1.0, -0.5]]), FP8, torch.float32)
    assert codes.float().tolist() == [[448.0, 16.0], [448.0, -224.0]], "17 lies between 16 and 18: half goes to even"
    assert scale[:, 0].tolist() == pytest.approx([1.0, 1 / 448])
    w = seeded(64, 32) * 0.02
    for to, error in ((torch.int8, 1 / 127), (FP8, 1 / 14)):
        codes, scale = round_channels(w, to, scale_dtype)
        assert scale.dtype == scale_dtype and codes.float().isfinite().all()
        assert ((codes.float() * scale.float() - w).abs().amax(1) / w.abs().amax(1)).max() < error
