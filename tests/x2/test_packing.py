"""Codes of 4 bits in words: the orders that checkpoints have them in, and our own."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.electives.quantization import packing
from tests.tiny import worked_case


def in_hex(words: torch.Tensor) -> list[str]:
    """The first code is the last digit."""
    return [f"{word & 0xFFFFFFFF:08x}" for word in words.flatten().tolist()]


def codes_of(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(seed)).byte()


class TestWords:
    def test_a_worked_case(self) -> None:
        codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [15, 0, 0, 0, 0, 0, 0, 1]]).byte()
        words = packing.pack_words(codes)
        says = (
            "code i lies in bits 4 i to 4 i + 3, and a digit of hexadecimal is 4 bits: the first code is the last digit"
        )
        got = {"words": in_hex(words), "unpacked": packing.unpack_words(words)}
        worked_case("x2.2", got, {"words": ["87654321", "1000000f"], "unpacked": codes}, says)

    def test_any_shape(self) -> None:
        codes = codes_of(6, 16).view(2, 3, 16)
        words = packing.pack_words(codes)
        assert words.shape == (2, 3, 2) and words.dtype == torch.int32, "neighbours of the last dimension share a word"
        back = packing.unpack_words(words)
        assert back.dtype == torch.uint8, f"codes are uint8, not {back.dtype}"
        assert torch.equal(back, codes), "unpacking gives back what was packed"

    def test_of_a_view(self) -> None:
        """GPTQ's words lie in columns."""
        codes = codes_of(16, 8).t()
        assert torch.equal(packing.unpack_words(packing.pack_words(codes)), codes), "codes need not lie side by side"
        words = packing.pack_words(codes_of(8, 16)).t()
        assert torch.equal(packing.unpack_words(words), packing.unpack_words(words.contiguous())), "nor do words"

    def test_the_highest_bit_is_a_code_too(self) -> None:
        words = packing.pack_words(torch.tensor([[0] * 7 + [15]]).byte())
        assert words.item() < 0, "the last code's highest bit is the word's sign"
        assert packing.unpack_words(words).tolist() == [[0] * 7 + [15]], "and comes back as a bit"


class TestPlanes:
    def test_a_worked_case(self) -> None:
        """Two groups of 16: codes 0 to 15, and the same in reverse."""
        codes = torch.cat([torch.arange(16), torch.arange(15, -1, -1)]).byte()[None]
        words = packing.pack_planes(codes, 16)
        says = (
            "a group of 16 has two words: codes 0, 2, 4, ... of it in the first, 1, 3, 5, ... in the second. So neighbouring "
            "words have neighbouring codes at the same place, and no word has codes of two groups"
        )
        got = {"words": in_hex(words), "unpacked": packing.unpack_planes(words, 16)}
        worked_case(
            "x2.2 planes", got, {"words": ["eca86420", "fdb97531", "13579bdf", "02468ace"], "unpacked": codes}, says
        )

    @settings(max_examples=10)
    @given(st.integers(1, 3), st.sampled_from([8, 16, 32]), st.integers(1, 3), st.integers(0, 99))
    def test_code_i_of_word_j(self, rows: int, group_size: int, groups: int, seed: int) -> None:
        codes, n = codes_of(rows, group_size * groups, seed), group_size // 8
        words = packing.pack_planes(codes, group_size)
        assert words.shape == (rows, n * groups) and words.is_contiguous(), "a row of words for each output"
        for group in range(groups):
            for j in range(n):
                for i in range(8):
                    code = words[:, group * n + j] >> 4 * i & 15
                    expected = codes[:, group * group_size + i * n + j]
                    assert torch.equal(code.byte(), expected), (
                        f"group {group}, word {j}, code {i}, groups of {group_size}"
                    )
        assert torch.equal(packing.unpack_planes(words, group_size), codes), "unpacking gives back what was packed"


def test_the_orders_of_checkpoints_by_hand() -> None:
    """Codes that are their own places, modulo 16."""
    codes = torch.arange(16).byte()
    assert in_hex(packing.pack_gptq(codes[None])) == ["76543210", "fedcba98"]
    assert in_hex(packing.pack_awq(codes[:8, None])) == ["75316420"]
    zeros = torch.tensor([0, 1, 2, 8, 9, 14, 15, 0])[:, None].byte()
    assert in_hex(packing.pack_gptq_zeros(zeros)) == ["fed8710f"]
    assert torch.equal(packing.unpack_gptq_zeros(packing.pack_gptq_zeros(zeros)), zeros)


@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_each_order_has_its_inverse(rows: int, columns: int, seed: int) -> None:
    codes = codes_of(8 * rows, 16 * columns, seed)
    for pack, unpack in ((packing.pack_gptq, packing.unpack_gptq), (packing.pack_awq, packing.unpack_awq)):
        packed = pack(codes)
        assert packed.dtype == torch.int32 and packed.numel() * 8 == codes.numel()
        assert torch.equal(unpack(packed), codes)
