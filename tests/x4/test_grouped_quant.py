"""The product of all experts whose weights are quantized, against torch in double precision."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from folovllm.electives.moe.experts import ExpertStack
from folovllm.electives.moe.layers import sort_by_expert
from folovllm.electives.quantization.fp8 import Fp8
from folovllm.electives.quantization.int4 import Int4
from folovllm.electives.quantization.layouts import GGUF, GGUF_MINIMUMS, INT8
from folovllm.electives.quantization.linear_method import SPREAD, Quantized
from tests.contract import DEVICE

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.electives.quantization.kernels import grouped_quant as grouped
from folovllm.electives.quantization.weight import has_fp8

ZEROS = replace(GGUF, zeros="zeros")
SMALL: dict[str, tuple[Quantized, int, int]] = {  # N, K
    "fp8": (Fp8(block=(16, 16)), 48, 80),
    "fp8 bits": (Fp8(), 33, 48),
    "int8": (Quantized(INT8), 40, 80),
    "int8 groups": (Quantized(INT8, (1, 32)), 24, 96),
    "int4": (Int4(GGUF, (1, 32)), 33, 96),
    "int4 zeros": (Int4(ZEROS, (1, 128)), 20, 256),
    "int4 minimums": (Int4(GGUF_MINIMUMS), 24, 224),
}
LARGE: dict[str, tuple[Quantized, int, int]] = {  # as in Qwen3-30B-A3B
    "fp8": (Fp8(block=(128, 128)), 768, 2048),
    "fp8 bits": (Fp8(), 2048, 768),
    "int8": (Quantized(INT8), 768, 2048),
    "int4": (Int4(GGUF, (1, 128)), 2048, 768),
    "int4 zeros": (Int4(ZEROS, (1, 128)), 768, 2048),
}


def stack_of(linear_method: Quantized, n: int, k: int, num_experts: int) -> ExpertStack:
    """Random codes and scales that differ, on the device that tests run on."""
    with torch.device(DEVICE):
        stack = ExpertStack(k, [n] * num_experts, linear_method)
    generator = torch.Generator(DEVICE).manual_seed(0)
    for kind, views in stack.weight_views().items():
        for view in views:
            if "scale" in kind:
                spread = SPREAD[linear_method.layout.dtype]
                view.copy_((torch.rand(view.shape, generator=generator, device=DEVICE) + 0.5) / spread / k**0.5)
            elif kind == "zeros":
                view.random_(0, 16, generator=generator) if view.dtype == torch.uint8 else view.fill_(-0.5 / k**0.5)
            else:
                linear_method.fill(kind, view, generator)
    linear_method.loaded(stack)
    return stack


def check(case: tuple[Quantized, int, int], asked: torch.Tensor, num_experts: int, dtype: torch.dtype) -> None:
    """Plain and gated. `asked` [T, k]: -1 is an expert of another rank, whose pairs stay as they were."""
    linear_method, n, k = case
    asked = asked.to(DEVICE)
    order, starts = sort_by_expert(asked, num_experts)
    x = torch.randn(len(asked), k, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    for per_expert in (1, 2):
        stack = stack_of(linear_method, n, k, per_expert * num_experts)
        out = torch.full((asked.numel(), n), 7.0, dtype=dtype, device=DEVICE)
        grouped.grouped_quant(x, linear_method.weight_of(stack), num_experts, order, starts, per_expert == 2, out)
        for pair, e in enumerate(asked.flatten().tolist()):
            y = torch.full((n,), 7.0, dtype=torch.float64, device=DEVICE)
            if e >= 0:
                w = linear_method.dequantized(stack, torch.float32, slice(per_expert * e, per_expert * (e + 1)))
                y = w.double() @ x[pair // asked.shape[1]].double()
                y = F.silu(y[:n]) * y[n:] if per_expert == 2 else y
            tol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
            torch.testing.assert_close(out[pair].double(), y, rtol=tol, atol=tol * float(y.abs().max()))


@pytest.mark.parametrize("name", SMALL)
def test_the_kernel_multiplies_as_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd shapes; expert 1 has no token, expert 2 more than a tile, and some tokens ask experts of other ranks."""
    if name == "fp8 bits":
        monkeypatch.setattr(grouped, "kind_of", lambda weight: "fp8_bits")
    elif name == "fp8" and not has_fp8(torch.device(DEVICE)):
        pytest.skip("this card has no numbers of FP8")
    asked = torch.tensor([[2, 0], [2, 4], *[[2, -1]] * 15, [3, 2]])
    check(SMALL[name], asked, 5, torch.float16 if name == "int4" else torch.float32)


def test_a_rank_whose_experts_nobody_asks() -> None:
    check(SMALL["int4"], torch.full((3, 2), -1), 3, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 64, 777])
@pytest.mark.parametrize("name", LARGE)
def test_the_kernel_multiplies_as_torch_in_large(name: str, num_tokens: int) -> None:
    num_experts = 128 if num_tokens < 777 else 16
    asked = torch.rand(num_tokens, num_experts, generator=torch.Generator().manual_seed(2)).topk(8).indices
    check(LARGE[name], asked[:, :4] if num_tokens == 777 else asked, num_experts, torch.bfloat16)
