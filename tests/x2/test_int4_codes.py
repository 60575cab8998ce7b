"""How a kernel reads a code of 4 bits: through the product of few tokens, in which nothing else is new."""

from __future__ import annotations

import pytest
import torch

from tests.contract import DEVICE
from tests.tiny import worked_case

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.electives.quantization.kernels.int4_linear import int4_linear


def packed(codes: torch.Tensor, group_size: int) -> torch.Tensor:
    """[outputs, inputs] -> [outputs, inputs / 8]: code i of a group's word j is its code i * n + j, with n words in a group."""
    planes = codes.long().unflatten(1, (-1, 8, group_size // 8))
    words = sum(planes[:, :, i] << 4 * i for i in range(8))
    assert isinstance(words, torch.Tensor)
    return words.flatten(1).to(torch.int32).to(DEVICE)


def product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    on = None if zeros is None else zeros.to(DEVICE)
    return int4_linear(x.to(DEVICE), packed(codes, codes.shape[1] // scales.shape[1]), scales.to(DEVICE), on).cpu()


def test_a_worked_case() -> None:
    """One group of 32: four words. Of codes 0, 5 and 7 of the first word, inputs 0, 20 and 28, x is 1, 2 and 1; else 0."""
    codes, x = torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 32)
    codes[0, [0, 20, 28]] = torch.tensor([10, 7, 15], dtype=torch.uint8)
    x[0, [0, 20, 28]] = torch.tensor([1.0, 2.0, 1.0])
    half = torch.tensor([[0.5]])
    got = {
        "8 is zero": product(x, codes, half, None),
        "3 is zero": product(x, codes, half, torch.tensor([[3]], dtype=torch.uint8)),
        "code 0 is 0.25": product(x, codes, half, torch.tensor([[0.25]])),
    }
    says = (
        "0.5 (2 + 2 * -1 + 7) is 3.5. The sum of x is 4; with 3 as zero it comes in with 0.5 (8 - 3), so 3.5 + 4 * 2.5. "
        "With a minimum of 0.25, a code less 8 has lost 8 * 0.5: 3.5 + 4 * (0.25 + 4)"
    )
    worked_case("x2.3", got, {"8 is zero": [[3.5]], "3 is zero": [[13.5]], "code 0 is 0.25": [[20.5]]}, says)


@pytest.mark.parametrize("place", range(8))
def test_each_code_of_a_word(place: int) -> None:
    """x picks one place of the word; each of 16 outputs has another code there, and all others are 15."""
    codes = torch.full((16, 32), 15, dtype=torch.uint8)
    codes[:, 4 * place] = torch.arange(16).byte()
    x = torch.zeros(1, 32)
    x[0, 4 * place] = 1.0
    got = product(x, codes, torch.ones(16, 1), None)
    assert got.tolist() == [[float(code - 8) for code in range(16)]], f"code {place} of a word is exact, less 8"


def test_a_zero_above_8() -> None:
    codes, x = torch.zeros(1, 32, dtype=torch.uint8), torch.zeros(1, 32)
    codes[0, 0], x[0, 0] = 10, 1.0
    got = product(x, codes, torch.tensor([[0.5]]), torch.tensor([[12]], dtype=torch.uint8)).item()
    assert got == -1.0, f"0.5 (10 - 12) is -1, not {got}: 8 - 12 is below 0, which no byte can say"


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("kind", ["codes", "minimums"])
def test_each_group_has_its_own_scale_and_zero(kind: str, size: int) -> None:
    """Two tokens, three outputs, three groups: the last ones are past a power of two. Scales have 16 bits, sums 32."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (3, 3 * size), generator=generator).byte()
    scales = (torch.rand(3, 3, generator=generator) + 0.1).half()
    zeros = torch.randint(0, 17, (3, 3), generator=generator).byte()
    minimums = torch.randn(3, 3, generator=generator).half()
    x = torch.randn(2, 3 * size, generator=generator)
    scale = scales.double().repeat_interleave(size, 1)
    if kind == "codes":
        weight = (codes.double() - zeros.double().repeat_interleave(size, 1)) * scale
    else:
        weight = codes.double() * scale + minimums.double().repeat_interleave(size, 1)
    got = product(x, codes, scales, zeros if kind == "codes" else minimums)
    expected = x.double() @ weight.t()
    assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4), (
        f"groups of {size} are {float((got.double() - expected).abs().max()):.2g} off: each has its own scale and zero, of 16 bits and widened first; "
        f"codes i + 1 meet inputs {size // 8} behind those of codes i"
    )


def test_a_norm_sees_x_before_its_factors() -> None:
    """x / rms(x) * columns, as a layer's norm has it. Of four quads that are read at once the last is not there."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (2, 96), generator=generator).byte()
    x, columns = torch.randn(1, 96, generator=generator) * 3, torch.rand(96, generator=generator) + 0.5
    scales, zeros = torch.full((2, 3), 0.1), torch.tensor([[3, 8, 1], [0, 12, 5]], dtype=torch.uint8)
    for name, zero in (("as 8 is zero", None), ("with zeros, which meet the sum of x times columns", zeros)):
        on = packed(codes, 32), scales.to(DEVICE), None if zero is None else zero.to(DEVICE)
        got = int4_linear(x.to(DEVICE), *on, norm_eps=1e-6, columns=columns.to(DEVICE)).cpu()
        weight = (codes.float() - (8 if zero is None else zero.float().repeat_interleave(32, 1))) * 0.1
        expected = x / x.square().mean().sqrt() * columns @ weight.t()
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4), (
            f"{name}: the norm has squares of all x, before they meet `columns`, and each x meets its own; {got.tolist()}, not {expected.tolist()}"
        )
