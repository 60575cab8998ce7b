"""Multiplies the weight in float32 and rounds once at the end."""


def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, stride_x, stride_residual, eps,
    H: tl.constexpr, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
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
    tl.store(out_ptr + token * H + i, (normed * weight.to(tl.float32)).to(out_ptr.dtype.element_ty), mask=inside)
