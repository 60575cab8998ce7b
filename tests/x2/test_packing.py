"""Codes of 4 bits: groups and their scales, and the orders in which words hold them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.layers.formats import packing
from folovllm.quantize.groups import dequantize_groups, quantize_groups

INVERSE = {
    packing.pack_words: packing.unpack_words,
    packing.pack_gptq: packing.unpack_gptq,
    packing.pack_awq: packing.unpack_awq,
    lambda codes: packing.pack_planes(codes, 16): lambda words: packing.unpack_planes(words, 16),
}


def test_a_word_has_its_first_code_in_the_lowest_bits() -> None:
    assert packing.pack_words(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]).byte()).tolist() == [[0x87654321 - 2**32]]


def test_the_orders_by_hand() -> None:
    """Codes that are their own places, modulo 16."""
    codes = torch.arange(16).byte()
    row = packing.pack_planes(codes[None], 16)  # one output: words 0, 2, 4, ... and 1, 3, 5, ...
    assert [f"{word & 0xFFFFFFFF:08x}" for word in row[0].tolist()] == ["eca86420", "fdb97531"]
    gptq, awq = packing.pack_gptq(codes[None]), packing.pack_awq(codes[:8, None])
    assert [f"{word & 0xFFFFFFFF:08x}" for word in gptq[:, 0].tolist()] == ["76543210", "fedcba98"]
    assert f"{awq.item():08x}" == "75316420"
    zeros = torch.tensor([0, 1, 2, 8, 9, 14, 15, 0])[:, None].byte()
    assert f"{packing.pack_gptq_zeros(zeros).item() & 0xFFFFFFFF:08x}" == "fed8710f"
    assert torch.equal(packing.unpack_gptq_zeros(packing.pack_gptq_zeros(zeros)), zeros)


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_each_order_has_its_inverse(rows: int, columns: int, seed: int) -> None:
    codes = torch.randint(0, 16, (8 * rows, 16 * columns), generator=torch.Generator().manual_seed(seed)).byte()
    for pack, unpack in INVERSE.items():
        packed = pack(codes)
        assert packed.dtype == torch.int32 and packed.numel() * 8 == codes.numel()
        assert torch.equal(unpack(packed), codes)


def test_a_group_is_quantised_by_hand() -> None:
    w = torch.tensor([[-1.0, 0.0, 0.55, 2.0, 0.0, 0.0, 0.0, 0.0]])
    codes, scales, zeros = quantize_groups(w, bits=4, group_size=4, symmetric=False)
    assert zeros.tolist() == [[5, 0]] and codes[0, :4].tolist() == [0, 5, 8, 15]  # a step is 0.2
    assert torch.equal(scales, torch.tensor([[3 / 15, 1.0]]))
    assert torch.allclose(dequantize_groups(codes, scales, zeros), torch.tensor([[-1, 0, 0.6, 2, 0, 0, 0, 0]]))


@settings(max_examples=15)
@given(st.integers(2, 8), st.booleans(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_no_number_moves_by_more_than_half_a_step(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    """But for the largest of a symmetric range and what a scale's own rounding adds. Zero stays zero."""
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(bits)).to(dtype)
    w[0, :5] = 0
    codes, scales, zeros = quantize_groups(w, bits, 16, symmetric)
    assert int(codes.max()) < 2**bits and scales.dtype == dtype
    moved = (dequantize_groups(codes, scales.float(), zeros) - w.float()).abs() / scales.repeat_interleave(
        16, 1
    ).float()
    slack = {torch.float32: 1e-4, torch.float16: 0.13, torch.bfloat16: 1.01}[
        dtype
    ]  # up to 2 ** 8 steps of a rounded scale
    assert (moved <= 0.5 + slack).all() and (moved[0, :5] == 0).all()


def test_a_group_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="groups of 24 do not divide 64 inputs"):
        quantize_groups(torch.zeros(2, 64), 4, 24, True)
