"""`rms_norm` and `add_rms_norm`: the residual sum and its normalisation in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs


@triton.jit
def inverse_rms(row_ptr, eps, H: tl.constexpr, WIDTH: tl.constexpr):
    """Return 1 / rms of a contiguous row [H], float32. WIDTH is the power of two from H up."""
    i = tl.arange(0, WIDTH)
    x = tl.load(row_ptr + i, mask=i < H, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / H + eps)


@triton.jit
def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, stride_x, stride_residual, eps,
    H: tl.constexpr, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One token's x [H]: sum = x + residual (where there is one) and out = sum / rms(sum) * weight.

    The sum is rounded to the model's dtype before its mean square is taken in float32, and the quotient again before
    the weight multiplies it: the rounding of `transformers`. Rows of `x` and `residual` are `stride_x` and
    `stride_residual` apart, those of `out` and `sum` are contiguous. Without a residual nothing is stored to `sum_ptr`.
    WIDTH is the power of two from H up.
    """
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = i < H
    x = tl.load(x_ptr + token * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + token * stride_residual + i, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * H + i, rounded, mask=inside)
        x = rounded.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    weight = tl.load(weight_ptr + i, mask=inside)
    tl.store(out_ptr + token * H + i, normed.to(out_ptr.dtype.element_ty) * weight, mask=inside)


@triton.jit
def deferred_add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, stride_x, stride_residual, eps,
    H: tl.constexpr, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`add_rms_norm_kernel` with programmatic dependent launch: lets the next kernel start, waits for its own inputs, then does all of it."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    add_rms_norm_kernel(
        x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, stride_x, stride_residual, eps, H, WIDTH, HAS_RESIDUAL
    )


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rms_norm(x + residual), x + residual) of `x` and `residual` [T, H], with `weight` [H] (Zhang and Sennrich, 2019)."""
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _launch(x, residual, weight, eps, total), total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x` [T, H] divided by its root mean square, times `weight` [H]. The first norm of a model has no residual."""
    return _launch(x, None, weight, eps, None)


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, total: torch.Tensor | None
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_tokens, hidden = x.shape
    if num_tokens:
        width, late = triton.next_power_of_2(hidden), launch_options(x.device, num_tokens)
        kernel, options = (deferred_add_rms_norm_kernel, late) if late["PDL"] else (add_rms_norm_kernel, {})
        kernel[(num_tokens,)](
            x, x if residual is None else residual, weight, out, out if total is None else total,
            x.stride(0), 0 if residual is None else residual.stride(0), eps,
            H=hidden, WIDTH=width, HAS_RESIDUAL=residual is not None, num_warps=min(8, max(1, width // 256)), **options,
        )  # fmt: skip
    return out
