"""Which kernels set their carveout. No GPU needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels import carveout

pytestmark = pytest.mark.m6


def kernel(name: str, tokens: int = 1) -> Any:
    """As far as it is looked at."""
    source = SimpleNamespace(fn=SimpleNamespace(arg_names=["x_ptr", "M"]), constants={(1,): tokens})
    return SimpleNamespace(name=name, src=source, function=tokens)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """What a driver is told: function, attribute, value. It does not know function 0."""
    calls: list[tuple[int, int, int]] = []

    def set_attribute(function: ctypes.c_void_p, attribute: int, value: int) -> int:
        calls.append((function.value or 0, attribute, value))
        return 0 if function.value else 400

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuFuncSetAttribute=set_attribute))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(carveout, "available", lambda device: True)
    return calls


def test_the_kernels_of_a_layer_for_one_or_two_tokens(told: list[tuple[int, int, int]]) -> None:
    for one in (
        kernel("skinny_linear_kernel", 1),
        kernel("skinny_linear_kernel", 2),
        kernel("skinny_linear_kernel", 4),
    ):
        carveout.divide_memory(one)
    for name in ("prefetching_decode_kernel", "decode_kernel", "gumbel_max_kernel"):
        carveout.divide_memory(kernel(name, 7))
    assert told == [(function, carveout.PREFERRED_CARVEOUT, carveout.SHARE) for function in (1, 2, 7)]


def test_a_driver_that_refuses(told: list[tuple[int, int, int]]) -> None:
    with pytest.raises(RuntimeError, match=r"the carveout of prefetching_decode_kernel cannot be set: .* 400"):
        carveout.divide_memory(kernel("prefetching_decode_kernel", 0))


def test_only_where_kernels_overlap(told: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carveout, "available", lambda device: False)
    carveout.divide_memory(kernel("prefetching_decode_kernel"))
    assert told == []
