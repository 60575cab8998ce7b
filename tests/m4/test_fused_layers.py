"""Fused kernels against the torch layers that they replace."""

import pytest
import torch
from transformers import AutoConfig

from folovllm.kernels.activation import gelu_and_mul, silu_and_mul
from folovllm.kernels.qk_norm_rope import Preparation, qk_norm_rope_store
from folovllm.kernels.rms_norm import add_rms_norm, rms_norm
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.rotary_embedding import RotaryEmbedding
from folovllm.models.fused import fused_layers
from folovllm.models.gemma3 import GeluAndMul
from folovllm.models.model_config import head_dim_of
from tests.helpers import FAMILIES, Driver, assert_logits_equal, prompts, tiny_checkpoint
from tests.m4.cases import DEVICE, assert_close
from tests.tiny import worked_case

DTYPES = [torch.float32, torch.float16]


def norm(size, dtype):
    """An RMSNorm with a random weight."""
    layer = RMSNorm(size).to(DEVICE, dtype)
    torch.nn.init.normal_(layer.weight, 1.0, 0.2)
    return layer.requires_grad_(False)


def test_a_worked_case_of_add_rms_norm():
    """Two tokens, sums [1, 1, 5] and [5, 1, 1]: the mean of their squares is 9, and eps is 16, so the root is 5."""
    x, residual = torch.zeros(2, 5, device=DEVICE), torch.zeros(4, 3, device=DEVICE)  # rows 5 and 3 apart
    x[:, :3] = torch.tensor([[0.0, 3.0, 1.0], [1.0, 1.0, 1.0]])
    residual[:2] = torch.tensor([[1.0, -2.0, 4.0], [4.0, 0.0, 0.0]])
    normed, total = add_rms_norm(x[:, :3], residual[:2], torch.tensor([1.0, 10.0, 1.0], device=DEVICE), 16.0)
    expected = {"sum": [[1.0, 1.0, 5.0], [5.0, 1.0, 1.0]], "out": [[0.2, 2.0, 1.0], [1.0, 2.0, 0.2]]}
    says = "[0, 3, 1] + [1, -2, 4] and [1, 1, 1] + [4, 0, 0], over sqrt(27 / 3 + 16) = 5, times the weights [1, 10, 1]"
    worked_case("m4.6", {"sum": total, "out": normed}, expected, says)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 72, 1000])
def test_add_rms_norm(hidden, dtype):
    """Both results: the norm, and the sum that the next residual needs. The inputs stay as they were."""
    layer = norm(hidden, dtype)
    x, residual = (3 * torch.randn(4, hidden, device=DEVICE, dtype=dtype) for _ in range(2))
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, layer.weight, layer.eps)
    expected, expected_total = layer(x, residual)
    assert torch.equal(total, expected_total), f"the sum is x + residual, rounded to the model's dtype, {dtype}"
    assert_close(normed, expected, says=f"out = sum / rms(sum) * weight, the mean square over H = {hidden} numbers")
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1]), "x and residual are the caller's and stay"


def test_add_rms_norm_of_zeros_and_of_small_numbers():
    """eps keeps a row of zeros finite, and is added to the mean square, not to the root."""
    layer = norm(32, torch.float32)
    x = torch.zeros(2, 32, device=DEVICE)
    x[1] = 1e-3
    normed, _ = add_rms_norm(x, torch.zeros_like(x), layer.weight, 1e-6)
    assert not normed[0].any(), "eps keeps a row of zeros at zero"
    says = "eps is added to the mean square, under the root: a row of 0.001 over sqrt(1e-6 + 1e-6)"
    assert_close(normed[1], layer.weight * 1e-3 / (1e-6 + 1e-6) ** 0.5, says=says)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_a_slice(dtype):
    """No residual, and rows that are not contiguous."""
    layer = norm(40, dtype)
    x = torch.randn(3, 100, device=DEVICE, dtype=dtype)[:, 20:60]
    says = "rows of 40 that are `stride_x` = 100 apart, without a residual"
    assert_close(rms_norm(x, layer.weight, layer.eps), layer(x), says=says)


def rounding_left_out(found, total, layer):
    """The clause that `found` breaks: of the sum (the float32 `total`) or of the quotient, whichever explains more of it."""
    rounded = total.half().float()
    kept = (total * torch.rsqrt(total.square().mean(-1, keepdim=True) + layer.eps)).half() * layer.weight
    quotient = rounded * torch.rsqrt(rounded.square().mean(-1, keepdim=True) + layer.eps)
    clauses = {
        "the sum is rounded to the model's dtype before its mean square is taken in float32": kept,
        "the quotient is rounded again before the weight multiplies it": (quotient * layer.weight.float()).half(),
    }
    return max(clauses, key=lambda clause: (found == clauses[clause]).float().mean().item())


@pytest.mark.parametrize("size", [1, 300])
def test_norm_rounds_where_transformers_does(size, like_a_gpu):
    """The sum before its mean square, the quotient before the weight; squares in float32, for 300 * 300 overflows float16.

    Each rounding left out changes a fifth of the results or more; another order of summing changes hardly one.
    """
    layer = norm(1000, torch.float16)
    x, residual = (size * torch.randn(4, 1000, device=DEVICE).half() for _ in range(2))
    for total, found, right in (
        (x.float() + residual.float(), add_rms_norm(x, residual, layer.weight, layer.eps)[0], layer(x, residual)[0]),
        (x.float(), rms_norm(x, layer.weight, layer.eps), layer(x)),
    ):
        off = (found != right).float().mean().item()
        assert off < 0.02, f"{off:.0%} of the numbers differ in float16: {rounding_left_out(found, total, layer)}"


def test_add_rms_norm_of_rows_with_different_strides(like_a_gpu):
    """Slices of two tensors: each has a stride of its own, and both results are contiguous."""
    layer = norm(40, torch.float32)
    x, residual = torch.randn(3, 100, device=DEVICE)[:, 20:60], torch.randn(3, 40, device=DEVICE)
    for first, second in ((x, residual), (residual, x)):
        normed, total = add_rms_norm(first, second, layer.weight, layer.eps)
        strides = f"rows of `x` are {first.stride(0)} apart, those of `residual` {second.stride(0)}"
        assert torch.equal(total, x + residual), f"{strides}: each has a stride of its own"
        assert_close(normed, layer(first, second)[0], says=strides)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 72, 1100])
@pytest.mark.parametrize("late", [False, True])
def test_silu_and_mul(width, late, dtype):
    """Widths that fill no block, one, and more than one. Dividing by the stream's root mean square afterwards is what a
    norm before the projection would have done; eps keeps a stream of zeros finite, and is what counts in a small one.
    """
    gate_up, stream = (4 * torch.randn(3, n, device=DEVICE, dtype=dtype) for n in (2 * width, 40))
    if not late:
        assert_close(silu_and_mul(gate_up), SiluAndMul()(gate_up))
        return
    for row, value in enumerate((0.0, 1e-3)):
        gate_up[row], stream[row] = value, value
    root = (stream.float().square().mean(1, keepdim=True) + 1e-6).sqrt()
    out, expected = silu_and_mul(gate_up, stream, 1e-6), SiluAndMul()((gate_up / root).to(dtype))
    assert not out[0].any()
    for row in (1, 2):
        assert_close(out[row], expected[row])


@pytest.mark.x4
@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_and_mul(dtype):
    """Also far from zero, where the exponential is infinite."""
    gate_up = 4 * torch.randn(3, 144, device=DEVICE, dtype=dtype)
    gate_up[0, :4] = torch.tensor([-1e3, 1e3, -20.0, 0.0])
    assert_close(gelu_and_mul(gate_up), GeluAndMul()(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize(("heads", "late"), [((4, 2), False), ((3, 1), False), ((4, 2), True)])
def test_qk_norm_rope_store(heads, late, with_norm, dtype):
    """Q comes back, K and V are in their slots, the rest of the cache is untouched, -1 stores nothing.

    `late`: queries, keys and values are first divided by the root mean square of the stream.
    """
    (num_heads, num_kv_heads), dim, block_size = heads, 16, 4
    rope = RotaryEmbedding(10000.0 ** -(torch.arange(0, dim, 2) / dim), 64).to(DEVICE)
    qkv = torch.randn(4, num_heads + 2 * num_kv_heads, dim, device=DEVICE, dtype=dtype)
    stream = 2 * torch.randn(4, 40, device=DEVICE, dtype=dtype)
    positions, slots = torch.tensor([0, 7, 63, 20], device=DEVICE), torch.tensor([5, 0, -1, 11], device=DEVICE)
    q_norm, k_norm = norm(dim, dtype), norm(dim, dtype)
    kv_cache = torch.full((2, 3, num_kv_heads, block_size, dim), 7.0, device=DEVICE, dtype=dtype).transpose(2, 3)
    weights = (q_norm.weight, k_norm.weight) if with_norm else (None, None)
    preparation = Preparation(rope.cos_sin_cache, *weights, q_norm.eps)
    parts, extra = [num_heads, num_kv_heads, num_kv_heads], (stream, 1e-5) if late else ()
    out = qk_norm_rope_store(*qkv.split(parts, dim=1), positions, kv_cache, slots, preparation, *extra)
    if late:
        qkv = (qkv / (stream.float().square().mean(1) + 1e-5).sqrt()[:, None, None]).to(dtype)
    query, key, value = qkv.split(parts, dim=1)
    if with_norm:
        query, key = q_norm(query), k_norm(key)
    expected, key = rope(positions, query, key)
    assert_close(out, expected)
    flat = kv_cache.reshape(2, -1, num_kv_heads, dim)
    live = slots >= 0
    assert_close(flat[0, slots[live]], key[live])
    assert_close(flat[1, slots[live]], value[live])
    assert late or torch.equal(flat[1, slots[live]], value[live])
    rest = torch.ones(flat.shape[1], dtype=torch.bool, device=DEVICE)
    rest[slots[live]] = False
    assert (flat[:, rest] == 7).all()


@pytest.mark.parametrize(("family", "fields"), [
    *((family, {"attention_bias": True} if family == "llama" else {}) for family in FAMILIES),
    ("qwen3", {"head_dim": 24}),  # no tile fits: heads keep their torch layers
])  # fmt: skip
def test_a_fused_model_computes_what_its_layers_did(family, fields):
    """Prompts and decodes, for every family. (With the layers of M6: `tests/m6/test_fused_layer.py`.)"""
    path = tiny_checkpoint(family, **fields)
    layers = fused_layers(head_dim_of(AutoConfig.from_pretrained(path)))
    plain, fused = (Driver(path, "torch_paged", device=DEVICE.type, layers=s) for s in (LayerSet(), layers))
    first, second = prompts([9, 5])
    for pieces in ({0: first, 1: second}, {0: [7], 1: [8]}, {0: [3], 1: [1, 2, 3]}):
        expected = plain.step(pieces)
        for seq, logits in fused.step(pieces).items():
            assert_logits_equal(logits, expected[seq])
