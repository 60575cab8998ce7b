"""The prefill for Hopper against float64, at and around every boundary, and who is sent to it.

Gluon has no interpreter: what it computes shows on a Hopper GPU only. That it compiles, spills nothing and fits shows
everywhere (`tests/m4/test_offline_compile.py`).
"""

import pytest
import torch

from folovllm.attention.backends.abstract import AttentionConfig
from folovllm.kernels.prefill import prefill
from tests.m4.cases import DEVICE, Paged, assert_close, starts
from tools.bench_attention import make_batch

pytest.importorskip("triton.experimental.gluon")

from folovllm.attention.backends import triton as triton_backend
from folovllm.electives.hopper.prefill import VARIANT, is_ahead, prefill_hopper
from folovllm.kernels.variants import KernelVariant

on_hopper = pytest.mark.skipif(
    DEVICE.type != "cuda" or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)
HOPPER = [pytest.mark.gpu, on_hopper]
SHAPES = [(16, 16, 8, 128), (32, 9, 3, 64), (64, 32, 8, 128), (128, 8, 1, 64), (256, 4, 4, 128)]  # B, Hq, Hkv, D
HALF = [torch.bfloat16, torch.float16]
# Tiles are of 128 tokens, groups of 64, boxes of 16 to 128.
LENS = [1, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 0, 512, 513, 1000, 2047, 4095]
NEW = [1, 9, 17, 40, 1, 64, 127, 128, 2, 100, 256, 129, 0, 300, 513, 1, 2047, 70]


def run(paged, query, new, **other):
    """The kernel over poisoned memory: what it must not read is NaN, and so is what it must write."""
    out = torch.full_like(query, float("nan"))
    return prefill_hopper(
        query, paged.kv_cache, starts(new), paged.seq_lens, paged.block_tables, max(new), query.shape[2] ** -0.5, out, **other
    )  # fmt: skip


class TestOnHopper:
    """Right, whatever the batch."""

    pytestmark = HOPPER

    @pytest.mark.parametrize("dtype", HALF, ids=str)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_ragged_batch(self, shape, dtype):
        """Whole prompts, chunks, single tokens and an empty row."""
        block_size, heads, kv_heads, dim = shape
        paged = Paged.make(LENS, block_size, kv_heads, dim, dtype)
        query = torch.randn(sum(NEW), heads, dim, device=DEVICE, dtype=dtype)
        assert_close(run(paged, query, NEW), paged.attention(query, NEW))

    @pytest.mark.parametrize("length", [1, 15, 64, 65, 128, 129, 130, 255, 256, 257, 383, 385, 700])
    @pytest.mark.parametrize("cached", [0, 1, 16, 127, 128, 200])
    def test_around_every_boundary(self, length, cached):
        """A prompt, and the rest after a cached prefix, which shifts the diagonal against the tiles."""
        paged = Paged.make([cached + length], 16, 1, 128, torch.bfloat16)
        query = torch.randn(length, 2, 128, device=DEVICE, dtype=torch.bfloat16)
        assert_close(run(paged, query, [length]), paged.attention(query, [length]))

    def test_decodes_before_are_left_alone(self):
        """`first_seq` skips the sequences that the decode kernel serves."""
        new = [1, 1, 300]
        paged = Paged.make([9, 200, 700], 16, 2, 64, torch.bfloat16)
        query = torch.randn(sum(new), 8, 64, device=DEVICE, dtype=torch.bfloat16)
        out = run(paged, query, new, first_seq=2)
        assert out[:2].isnan().all()
        assert_close(out[2:], paged.attention(query, new)[2:])

    def test_strided_queries(self):
        """Queries as they lie in a projection."""
        paged = Paged.make([400], 16, 4, 128, torch.bfloat16)
        whole = torch.randn(400, 3, 8, 128, device=DEVICE, dtype=torch.bfloat16)
        query = whole[:, 1]
        args = (starts([400]), paged.seq_lens, paged.block_tables, 400, 0.1)
        out = prefill_hopper(query, paged.kv_cache, *args)
        assert torch.equal(out, prefill_hopper(query.contiguous(), paged.kv_cache, *args))

    def test_no_race(self):
        """Nobody waits wrongly: hundreds of runs over poisoned output agree bit by bit."""
        lens = [1, 100, 128, 1000, 3000, 257]
        paged = Paged.make(lens, 16, 8, 128, torch.bfloat16)
        query = torch.randn(sum(lens), 16, 128, device=DEVICE, dtype=torch.bfloat16)
        expected = run(paged, query, lens)
        assert_close(expected, paged.attention(query, lens))
        differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(300):
            differing += (run(paged, query, lens).view(torch.int16) != expected.view(torch.int16)).sum()
        assert differing.item() == 0

    def test_long_prompts_as_the_other_kernel(self):
        """32,768 tokens, more than a reference in float64 holds."""
        batch = make_batch([32_768], 16, False, DEVICE)
        cache = torch.randn(2, 2048, 2, 16, 128, device=DEVICE, dtype=torch.bfloat16).permute(0, 1, 3, 2, 4)
        query = torch.randn(32_768, 4, 128, device=DEVICE, dtype=torch.bfloat16)
        args = (cache, batch.query_start_loc, batch.seq_lens, batch.block_tables, 32_768, 128**-0.5)
        assert_close(prefill_hopper(query, *args), prefill(query, *args))


def test_whom_it_serves():
    """Half precision, head dims whose tiles fit, blocks that are whole boxes, no cache in 8 bits."""

    def is_supported(head_dim, dtype, block_size, **other):
        config = AttentionConfig(2, 1, head_dim, dtype, torch.device("cuda"), block_size, 4, **other)
        return VARIANT.is_supported(config, 8192, 8192)

    half = torch.bfloat16
    assert all(is_supported(dim, dtype, 16) for dim in (64, 128) for dtype in HALF)
    assert [size for size in (4, 16, 24, 32, 48, 64, 96, 128, 192, 256, 4096) if is_supported(128, half, size)] == [
        16, 32, 64, 128, 256, 4096]  # fmt: skip
    assert not is_supported(256, half, 16) and not is_supported(32, half, 16)
    assert not is_supported(128, torch.float32, 16)
    assert not is_supported(128, half, 16, kv_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_short_prompts_stay_where_they_were(head_dim):
    """There is one length from which on it is ahead, and steps that are too short for it whatever their lengths."""
    ahead = [is_ahead(head_dim, 16_384, n) for n in range(1, 5000)]
    assert ahead == sorted(ahead) and not ahead[0] and ahead[-1]
    assert not is_ahead(head_dim, 4095, 4095) and is_ahead(head_dim, 4096, 4096)


def test_long_prompts_are_sent_to_it(monkeypatch):
    """By the longest of the batch, and only where it may: in M4 and M5 a prompt of any length is the reader's own kernel's."""
    calls = []
    variant = KernelVariant(lambda c, *step: is_ahead(c.head_dim, *step), lambda *args, **_: calls.append("hopper"))
    monkeypatch.setattr(triton_backend, "prefill", lambda *args, **_: calls.append("prefill"))
    monkeypatch.setattr(triton_backend, "kernel_variant", lambda kernel, device: variant)
    for lens, hopper in (([5000], True), ([7, 5000], True), ([5], False)):
        for may in (True, False):
            config = AttentionConfig(2, 1, 128, torch.float32, DEVICE, 16, 4, long_prompts=may)
            batch, query = make_batch(lens, 16, False, DEVICE), torch.zeros(sum(lens), 2, 128, device=DEVICE)
            triton_backend.TritonBackend(config).forward(query, torch.zeros(2, 1, 16, 1, 128), batch)
            assert calls.pop() == ("hopper" if hopper and may else "prefill") and not calls
