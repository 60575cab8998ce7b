"""Finds the residual's row by the stride of x. Input: x a slice of a wider tensor, a residual that is not."""

def add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr, stride_x, stride_residual, eps,
    H: tl.constexpr, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    inside = i < H
    x = tl.load(x_ptr + token * stride_x + i, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        x = (x.to(tl.float32) + tl.load(residual_ptr + token * stride_x + i, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + token * H + i, x, mask=inside)
    f = x.to(tl.float32)
    normed = (f * tl.rsqrt(tl.sum(f * f, 0) / H + eps)).to(x.dtype)
    tl.store(out_ptr + token * H + i, normed * tl.load(weight_ptr + i, mask=inside, other=0.0), mask=inside)
