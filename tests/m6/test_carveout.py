"""Which kernels set their carveout. No GPU needed."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels import carveout

pytestmark = pytest.mark.m6


SETS = [("skinny_linear_kernel", 1), ("skinny_linear_kernel", 2), ("prefetching_decode_kernel", 7)]
LEAVES = [("skinny_linear_kernel", 4), ("decode_kernel", 7), ("gumbel_max_kernel", 7)]


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("driver_says", [0, 400])
def test_kernels_for_one_or_two_tokens(overlaps: bool, driver_says: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where kernels overlap; and a driver that refuses is an error."""
    told: list[tuple[int, int, int]] = []

    def set_attribute(function: ctypes.c_void_p, attribute: int, value: int) -> int:
        told.append((function.value or 0, attribute, value))
        return driver_says

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuFuncSetAttribute=set_attribute))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(carveout, "available", lambda device: overlaps)
    for name, tokens in (*LEAVES, *SETS):
        source = SimpleNamespace(fn=SimpleNamespace(arg_names=["x_ptr", "M"]), constants={(1,): tokens})
        refused = overlaps and driver_says and (name, tokens) in SETS
        error = pytest.raises(RuntimeError, match=f"the carveout of {name} cannot be set: .* 400")
        with error if refused else nullcontext():
            carveout.divide_memory(SimpleNamespace(name=name, src=source, function=tokens))
    expected = [(function, carveout.PREFERRED_CARVEOUT, carveout.SHARE) for function in (1, 2, 7)]
    assert told == (expected if overlaps else [])
