"""The decode kernels that take in the new tokens themselves: the same numbers as a kernel before them, and the same cache."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.kernels import prefetching_decode as early
from folovllm.kernels.decode import DecodeConfig, SplitKVDecode
from folovllm.kernels.qk_norm_rope import Preparation, qk_norm_rope_store
from folovllm.layers.rotary_embedding import RotaryEmbedding
from tests.m4.cases import DEVICE, Paged

CHUNK = 32
AROUND = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 0, 2 * CHUNK + 1, 100]  # a new token that begins, ends a chunk
CASES = [((2, 1), 16, 16, True), ((6, 2), 32, 5, True), ((2, 2), 16, 32, False)]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def frequencies(dim: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, dim, 2) / dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(("heads", "dim", "block_size", "norm"), CASES)
def test_equals_the_two_kernels(
    dtype: torch.dtype, is_early: bool, heads: tuple[int, int], dim: int, block_size: int, norm: bool, monkeypatch: Any
) -> None:
    """With and without QK-norm; unowned slots are NaN, the new tokens' too.

    The kernel that asks early has chunks of two tiles, of which the second comes late; blocks of a tile's size, larger
    ones, and others.
    """
    monkeypatch.setattr(early, "TILE", 16)
    torch.manual_seed(0)
    (num_heads, num_kv_heads), num_seqs = heads, len(AROUND)
    paged = Paged.make(AROUND, block_size, num_kv_heads, dim, dtype)
    lens = torch.tensor(AROUND, device=DEVICE)
    last = (lens - 1).clamp(min=0)
    blocks = paged.block_tables.gather(1, (last // block_size)[:, None].long())[:, 0].long()
    slots = torch.where(lens > 0, blocks * block_size + last % block_size, -1)
    for slot in slots[slots >= 0].tolist():
        paged.kv_cache[:, slot // block_size, slot % block_size] = float("nan")
    other_cache = paged.kv_cache.clone()

    qkv = torch.randn(num_seqs, (num_heads + 2 * num_kv_heads) * dim, device=DEVICE, dtype=dtype)
    weights = [1 + torch.rand(dim, device=DEVICE, dtype=dtype) for _ in range(2)] if norm else [None, None]
    cos_sin = RotaryEmbedding(frequencies(dim), 128).to(DEVICE).cos_sin_cache
    parts = torch.split(qkv.view(num_seqs, -1, dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    preparation = Preparation(cos_sin, *weights, 1e-5)
    query = qk_norm_rope_store(*parts, last, other_cache, slots, preparation)

    config = DecodeConfig(tile=16, min_chunk=CHUNK, max_chunk=CHUNK, queue_chunk=CHUNK, merge_step=2)
    kernel = SplitKVDecode(num_seqs, num_heads, num_kv_heads, dim, block_size, DEVICE, config, num_programs=3)
    kernel.plan(paged.seq_lens, num_seqs)
    out, expected = torch.full((2, num_seqs, num_heads, dim), float("nan"), device=DEVICE, dtype=dtype)
    table = paged.block_tables
    kernel(query, other_cache, table, num_seqs, dim**-0.5, expected)
    own = (qkv, paged.kv_cache, table, num_seqs, dim**-0.5, out, preparation)
    early.prefetching_decode(kernel, *own, num_programs=3) if is_early else kernel(*own)

    tol = 1e-5 if dtype == torch.float32 else 2e-2
    assert torch.allclose(paged.kv_cache.float(), other_cache.float(), rtol=tol, atol=tol, equal_nan=True)
    assert torch.allclose(out.float(), expected.float(), rtol=tol, atol=tol)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 16, 32])
@pytest.mark.parametrize("lens", [[1], [64], [65, 130], [2, 700, 0, 3000]], ids=str)
def test_many_times_in_a_row_on_a_gpu(num_heads: int, lens: list[int]) -> None:
    """As it is launched: after a kernel that it overlaps with, over and over. What it asked for early must not be stale."""
    hkv, dim, num_seqs = 8, 128, len(lens)
    paged = Paged.make([n + 40 for n in lens], 16, hkv, dim, torch.bfloat16)
    cache, other = paged.kv_cache.nan_to_num(1.0), paged.kv_cache.nan_to_num(1.0)
    weights = [1 + torch.rand(dim, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
    preparation = Preparation(RotaryEmbedding(frequencies(dim), 4096).to(DEVICE).cos_sin_cache, *weights, 1e-6)
    kernel = SplitKVDecode(num_seqs, num_heads, hkv, dim, 16, DEVICE)
    assert early.is_supported(kernel, cache, num_seqs) == (torch.cuda.get_device_capability() >= (9, 0))
    for step in range(40):
        qkv = torch.randn(num_seqs, (num_heads + 2 * hkv) * dim, device=DEVICE, dtype=torch.bfloat16)
        seq_lens = torch.tensor([n + step * (n > 0) for n in lens], device=DEVICE, dtype=torch.int32)
        kernel.plan(seq_lens, num_seqs)
        out, expected = torch.full((2, num_seqs, num_heads, dim), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        kernel(qkv, other, paged.block_tables, num_seqs, dim**-0.5, expected, preparation)
        for _ in range(3):
            early.prefetching_decode(kernel, qkv, cache, paged.block_tables, num_seqs, dim**-0.5, out, preparation)
        assert torch.allclose(out.float(), expected.float(), rtol=2e-2, atol=2e-2), f"step {step}"
        assert torch.allclose(cache.float(), other.float(), rtol=2e-2, atol=2e-2), f"step {step}"
