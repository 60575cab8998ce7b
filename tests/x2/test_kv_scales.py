"""What K/V in 8 bits are multiples of, and how a number becomes one of 8 bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.electives.quantization.calibrate import scales_of
from folovllm.step.kv_format import FP8, KVScales, decode, encode
from tests.tiny import worked_case


def cache_of(key: float, value: float) -> torch.Tensor:
    """[2, N, B, Hkv, D] whose largest numbers are these."""
    cache = torch.zeros(2, 3, 4, 1, 2)
    cache[0, 1, 2, 0, 1], cache[1, 0, 3, 0, 0] = key, value
    return cache


def test_a_worked_case() -> None:
    """Keys as large as 24, values as large as 0.875."""
    (scales,) = scales_of([cache_of(-24.0, 0.875)])
    says = (
        "twice 24 over 448 is 0.107, and the next power of two is 1/8; twice 0.875 over 448 is 1/256, which is one. "
        "So -24 is kept as -192, and 0.7 as 179.2, whose neighbours are 176 and 192: 176"
    )
    got = {
        "scale of keys": scales.key,
        "scale of values": scales.value,
        "-24": encode(torch.tensor([-24.0]), scales.key_factor).float(),
        "0.7": encode(torch.tensor([0.7]), scales.value_factor).float(),
        "1000": encode(torch.tensor([1000.0]), scales.key_factor).float(),
    }
    expected = {"scale of keys": 0.125, "scale of values": 0.00390625, "-24": [-192.0], "0.7": [176.0], "1000": [448.0]}
    worked_case("x2.4", got, expected, says)


@given(st.lists(st.floats(1e-6, 1e4), min_size=2, max_size=2))
@settings(max_examples=50)
def test_scales_leave_headroom_and_are_powers_of_two(largest: list[float]) -> None:
    (scales,) = scales_of([cache_of(-largest[0], largest[1])])
    for scale, most in zip((scales.key, scales.value), largest, strict=True):
        assert most <= 224.01 * scale, f"{most} is more than half of 448 times {scale}: a prompt may bring larger ones"
        assert 112 * scale < most * 1.0001, f"{scale} is coarser than {most} needs"
        assert torch.tensor(scale).log2().frac() == 0, f"{scale} is no power of two"


def test_each_layer_has_its_own() -> None:
    wide = cache_of(7.0 * 2**15, 7.0)
    caches = [cache_of(-7.0, 3.5), cache_of(3.5, 7.0).half(), wide, wide.bfloat16()]
    found = scales_of(caches)
    assert found[:2] == [KVScales(1 / 32, 1 / 64), KVScales(1 / 64, 1 / 32)], (
        "a pair for each layer, whatever its dtype"
    )
    says = f"229,376 is beyond float16, and a cache of float32 or bfloat16 holds it: 2 * 229,376 / 448 is 1,024, not {found[2:]}"
    assert found[2:] == [KVScales(1024.0, 1 / 32)] * 2, says
    assert caches[0].equal(cache_of(-7.0, 3.5)), "the cache has been changed: it is looked at, and then used"
    assert type(found[0].key) is float, "a scale is a Python float, which kernels take as an argument"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_cache_that_holds_nothing(dtype: torch.dtype) -> None:
    (scales,) = scales_of([torch.zeros(2, 1, 1, 1, 2, dtype=dtype)])
    assert 0 < scales.key == scales.value, "a number is divided by its scale: it may not be 0, as 2^-40 is in float16"


def test_twice_the_largest_is_too_much_for_16_bits() -> None:
    (scales,) = scales_of([cache_of(60000.0, 1.75).half()])
    assert scales == KVScales(512.0, 1 / 128), "2 * 60,000 / 448 is 268, and float16 ends at 65,504: reckon in float32"


def test_what_is_too_large_becomes_the_largest() -> None:
    x = torch.tensor([449.0, 464.0, 1e9, -1e9, float("inf")])
    got = encode(x, 1.0)
    assert got.dtype == FP8, "a cache of 8 bits"
    assert got.float().tolist() == [448.0, 448.0, 448.0, -448.0, 448.0], "E4M3 ends at 448; beyond is no number"
    assert encode(torch.tensor([1024.0]), 0.25).item() == 256.0, "1024 * 0.25 is not too large: multiply, then clamp"


def test_it_is_clamped_before_it_is_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a cast makes of too large a number depends on the version of torch. Here the cast changes nothing."""
    monkeypatch.setitem(encode.__globals__, "FP8", torch.float32)
    got = encode(torch.tensor([1000.0, -1e9]), 1.0).float().tolist()
    assert got == [448.0, -448.0], (
        f"1,000 and -1e9 come to the cast as {got}, not as 448 and -448: in some versions that gives NaN"
    )


def test_16_bits_are_multiplied_in_32() -> None:
    x = torch.linspace(0.5, 200, 997).bfloat16()
    factor = 1 / 0.37
    assert torch.equal(encode(x, factor).float(), (x.float() * factor).to(FP8).float()), "multiply in float32"


def test_there_and_back() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    before = x.clone()
    back = decode(encode(x, 8.0), 1 / 8, torch.float32)
    assert torch.equal(x, before), "x has been changed, and attention still needs it"
    assert ((back - x).abs() <= x.abs() / 16 + 2**-10 / 8).all(), "three bits of mantissa: at most a sixteenth is lost"
