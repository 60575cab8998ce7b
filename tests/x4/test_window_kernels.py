"""Sliding windows in every backend, over blocks that hold somebody else's NaN as soon as no token sees them."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from folovllm.attention.backends.registry import make_backend
from folovllm.attention.backends.torch_naive import TorchNaiveBackend
from folovllm.step.kv_format import FP8
from tests import contract
from tests.contract import PAGED, Case, check, make_problem
from tests.x2.test_fp8_cache import SCALES, in_8_bits, read_back

SEQS = ((7, 1), (16, 1), (40, 1), (99, 1), (0, 5), (3, 37), (19, 4), (70, 50))  # decodes first; chunks in the middle
CASES = (
    Case("window 45, two KV heads", SEQS, window=45),
    *(Case(f"window {window}", SEQS, 2, 1, window=window) for window in (1, 16, 17)),
    Case("one that nobody reaches", SEQS, 2, 1, window=500),
    Case("blocks of 4", SEQS, 2, 1, block_size=4, window=9),
    Case("blocks of 256", ((300, 1), (290, 12)), 2, 1, block_size=256, window=33),
    Case("a decode in many chunks", ((400, 1),), 2, 1, block_size=4, window=201),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("name", ["torch_paged", "triton"])
def test_a_token_sees_its_window_and_nothing_before_it(name: str, case: Case) -> None:
    check(name, case)


@pytest.mark.parametrize("name", ["torch_paged", "triton"])
def test_over_a_cache_in_8_bits(name: str) -> None:
    case = CASES[3]
    config = contract.make_backend(name, case, torch.float32).config
    whole = make_backend(name, replace(config, kv_dtype=FP8))
    backend, p = whole.of_layer(SCALES, case.window), make_problem(config, case)
    cache = in_8_bits(p.cache_after, SCALES)
    whole.plan(p.batch)
    out = backend.forward(p.query, cache, p.batch)
    oracle = TorchNaiveBackend(config).sliding(case.window or 0)
    expected = oracle.forward(p.query, read_back(cache, SCALES, torch.float32), p.batch)
    assert not out.isnan().any()
    assert (out - expected).abs().max() <= contract.TOLERANCE[torch.float32] * max(1.0, float(expected.abs().max()))


def test_a_decode_that_stores_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that takes in the raw projection gives what the two kernels give, each with a window."""
    raw = pytest.importorskip("tests.m6.test_raw_decodes", reason="Triton is for Linux only")
    monkeypatch.setattr(raw, "SplitKVDecode", partial(raw.SplitKVDecode, window=37))
    raw.test_equals_the_two_kernels(torch.float32, False, (6, 2), 32, 5, True, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAGED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_on_a_gpu(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """Gemma's heads of 256 dimensions too; sequences of many tiles, so that all kinds of tiles occur."""
    seqs = ((5, 1), (1500, 1), (4000, 1), (0, 700), (1000, 1300))
    for window in (512, 1000):
        check(name, Case("long", seqs, 8, 2, head_dim, window=window), dtype)
