"""GPTQ: beside the derivation it comes from, beside rounding to nearest, and its loop by hand."""

from __future__ import annotations

import pytest
import torch

from folovllm.electives.quantization.quantizer.awq import output_error
from folovllm.electives.quantization.quantizer.gptq import act_order, gptq, inverse_factor, round_columns
from folovllm.electives.quantization.quantizer.groups import dequantize_groups, find_scales, quantize_groups
from tests.tiny import worked_case

ONE, EIGHT = torch.ones(1, 1), torch.full((1, 1), 8, dtype=torch.uint8)


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights, and the gram of inputs that depend on each other; some are large, and one never occurs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    x[:, 3] *= 8
    x[:, 7] = 0
    return torch.randn(24, 64, generator=generator), x.t() @ x / len(x)


def mean_error(rounded: torch.Tensor, w: torch.Tensor, gram: torch.Tensor) -> float:
    return float(output_error(rounded - w, gram).mean())


class TestRoundColumns:
    def test_a_worked_case(self) -> None:
        """A step is 1 and 8 is zero."""
        factor = torch.tensor([[2.0, 1.0, 0.5], [0.0, 1.0, 1.0], [0.0, 0.0, 4.0]])
        codes, errors = round_columns(torch.tensor([[1.4, 2.4, -0.9]]), factor, ONE, EIGHT, bits=4)
        says = (
            "1.4 becomes 1: 0.4 too much, divided by 2 is 0.2. So 2.4 - 0.2 * 1 = 2.2 becomes 2, whose error is 0.2 / 1, and "
            "-0.9 - 0.2 * 0.5 - 0.2 * 1 = -1.2 becomes -1, whose error is -0.2 / 4"
        )
        got = {"codes": codes, "errors": errors}
        worked_case("x2.5", got, {"codes": [[9, 10, 7]], "errors": [[0.2, 0.2, -0.05]]}, says)

    def test_what_is_given_stays_as_it_is(self) -> None:
        w, factor = torch.randn(3, 4), torch.eye(4) + torch.ones(4, 4).triu()
        before = w.clone()
        round_columns(w, factor, torch.ones(3, 1), EIGHT.expand(3, 1), bits=4)
        assert torch.equal(w, before), "w has changed, and the caller still needs it"

    def test_each_output_has_its_own_scale_and_zero(self) -> None:
        w = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
        scale, zero = torch.tensor([[0.5], [0.25]]), torch.tensor([[3], [1]], dtype=torch.uint8)
        codes, errors = round_columns(w, torch.eye(2), scale, zero, bits=4)
        assert codes.tolist() == [[4, 4], [3, 3]] and codes.dtype == torch.uint8, "0.5 is one step of 0.5, two of 0.25"
        assert not errors.any(), "all of these can be expressed exactly"

    def test_a_scale_of_16_bits_is_multiplied_in_32(self) -> None:
        """5 steps of 1.0078125 are 5.0390625, which bfloat16 would round to 5.03125."""
        scale = torch.full((1, 1), 1.0078125).bfloat16()
        codes, errors = round_columns(torch.tensor([[5.0]]), torch.ones(1, 1), scale, EIGHT, bits=4)
        assert codes.tolist() == [[13]] and errors.tolist() == [[-0.0390625]], (
            "an error is a float32, and so is the product"
        )
        assert errors.dtype == torch.float32, f"errors are float32, not {errors.dtype}, whatever the scale is"


class TestGptq:
    def test_errors_go_from_group_to_group(self) -> None:
        """The codes are those of the derivation, which inverts what is left of the matrix for each column anew."""
        w, gram = problem()
        codes, scales, zeros = gptq(w, gram, 4, 16, symmetric=False, damping=0.05)
        assert torch.equal(w, problem()[0]), "`w` has been changed, and the caller still needs it: work on a copy"
        damped = (gram + 0.05 * gram.diagonal().mean() * torch.eye(64)).double()
        rest = w.double()
        for i in range(64):
            if i % 16 == 0:
                fitting, _ = find_scales(rest[:, i : i + 16], 4, 16, symmetric=False)
                assert torch.allclose(scales[:, i // 16].double(), fitting[:, 0], rtol=1e-3), (
                    f"the scale of group {i // 16} must fit weights that have taken in the errors before it"
                )
            scale, zero = scales[:, i // 16].double(), zeros[:, i // 16].double()
            code = (rest[:, i] / scale).round().add(zero).clamp(0, 15)
            same = (code == codes[:, i]).double().mean()
            assert same > 0.9, (
                f"column {i}, of group {i // 16}: {same:.0%} of the codes are those of optimal brain surgeon with a damping of 0.05"
            )
            error = rest[:, i] - (codes[:, i].double() - zero) * scale  # along GPTQ's own codes: a tie tears nothing
            inverse = torch.linalg.inv(damped[i:, i:])
            rest[:, i:] -= torch.outer(error, inverse[0] / inverse[0, 0])

    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("group_size", [16, 64])
    def test_outputs_change_less_than_by_rounding(self, symmetric: bool, group_size: int) -> None:
        w, gram = problem()
        nearest = mean_error(dequantize_groups(*quantize_groups(w, 4, group_size, symmetric)), w, gram)
        coded = gptq(w, gram, 4, group_size, symmetric)
        found = mean_error(dequantize_groups(*coded), w, gram)
        assert found < 0.5 * nearest, f"GPTQ's outputs are off by {found:.3g}, rounding's by {nearest:.3g}"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_independent_inputs_leave_nothing_to_make_up_for(self, dtype: torch.dtype) -> None:
        w = problem()[0].to(dtype)
        found = zip(gptq(w, torch.eye(64), 8, 32, True), quantize_groups(w, 8, 32, True), strict=True)
        for name, (ours, nearest) in zip(("codes", "scales", "zeros"), found, strict=True):
            assert torch.equal(ours, nearest), (
                f"no input says anything of another, so GPTQ is rounding to nearest; {name} of weights in {dtype} differ. "
                "Are codes chosen with the scale that is returned?"
            )

    def test_scales_come_in_the_dtype_of_the_weights(self) -> None:
        w, gram = problem()
        codes, scales, zeros = gptq(w.bfloat16(), gram, 4, 32, symmetric=False)
        dtypes = codes.dtype, scales.dtype, zeros.dtype
        assert dtypes == (torch.uint8, torch.bfloat16, torch.uint8), f"codes, scales, zeros come as {dtypes}"
        assert codes.shape == w.shape and scales.shape == zeros.shape == (24, 2), (
            "a scale and a zero for each group of 32"
        )

    def test_a_group_above_zero_keeps_a_zero_that_can_be_stored(self) -> None:
        w = problem()[0].abs()
        codes, scales, zeros = gptq(w, torch.eye(64), 4, 32, symmetric=False)
        assert zeros.min() == 1, "a zero of 0 comes back as 16"
        steps = (dequantize_groups(codes, scales, zeros) - w).abs() / scales.repeat_interleave(32, 1)
        assert steps.max() < 1.1, (
            f"a weight is off by {float(steps.max()):.1f} steps: codes must be chosen with the zero that is returned"
        )

    def test_a_group_size_that_does_not_divide_is_refused(self) -> None:
        with pytest.raises(ValueError, match="groups of 24 do not divide 64 inputs"):
            gptq(*problem(), 4, 24, True)

    def test_the_largest_inputs_first(self) -> None:
        w, gram = problem()
        order = act_order(gram)
        assert order[0] == 3 and order[-1] == 7, "input 3 is the largest, and input 7 never occurs"
        plain = mean_error(dequantize_groups(*gptq(w, gram, 4, 16, True)), w, gram)
        ordered = dequantize_groups(*gptq(w[:, order], gram[order][:, order], 4, 16, True))[:, order.argsort()]
        assert mean_error(ordered, w, gram) < plain, "the columns that count most should be rounded first"


class TestInverseFactor:
    def test_what_cannot_be_inverted_is_said(self) -> None:
        with pytest.raises(ValueError, match=r"too alike for a damping of 1e-09: try 0\.1"):
            inverse_factor(torch.ones(64, 64), 1e-9)
        assert inverse_factor(torch.zeros(4, 4), 0.01).isfinite().all(), "inputs that never occur are no error"
