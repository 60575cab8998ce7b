"""Matrix times very few rows: what the layers of a decode are at batch 1 to 4.

There is nothing to compute here, only weights to read, and libraries are tuned for larger batches. Three things make this
kernel fast; what each is worth, and what was worth nothing, is in `docs/performance_log.md`:

- A program asks for all its weights before it waits for its inputs, and keeps them in registers.
- Tiles of `x` and of the weights have one shape, so the elements that meet are in the same thread from the start.
- Pairs of bfloat16 are read as one int32, and take one instruction each to become float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs

MAX_TOKENS = 4  # above, the library's matrix product is better


@triton.jit
def multiply_add(a, b, total):
    """total + a * b, element by element, in float32. Of pairs of bfloat16 in an int32: total and both products."""
    if a.dtype == tl.int32:
        total += (a << 16).to(tl.float32, bitcast=True) * (b << 16).to(tl.float32, bitcast=True)
        total += (a & -65536).to(tl.float32, bitcast=True) * (b & -65536).to(tl.float32, bitcast=True)
    else:
        total += a.to(tl.float32) * b.to(tl.float32)
    return total


@triton.jit
def load_chunk(row_ptr, k, start: tl.constexpr, WIDTH: tl.constexpr, POLICY: tl.constexpr):
    """Columns start + k of some rows, `row_ptr` at their column k; zeros past WIDTH, and a mask only where that can be."""
    if start + k.shape[1] <= WIDTH:
        chunk = tl.load(row_ptr + start, eviction_policy=POLICY)
    else:
        chunk = tl.load(row_ptr + start, mask=k < WIDTH - start, other=0, eviction_policy=POLICY)
    return chunk


@triton.jit
def load_rows(row_ptr, k, WIDTH: tl.constexpr):
    """All chunks of some rows of weights. Each is read once, so it leaves the caches to `x` (`evict_first`)."""
    chunks = ()
    for start in tl.static_range(0, WIDTH, k.shape[1]):
        chunks = chunks + (load_chunk(row_ptr, k, start, WIDTH, "evict_first"),)
    return chunks


@triton.jit
def add_products(sums, weights, xs):
    """Of each token: the sum so far, and this chunk's products. Tokens are the inner loop: a chunk is unpacked once."""
    result = ()
    for m in tl.static_range(len(xs)):
        result = result + (multiply_add(weights, xs[m], sums[m]),)
    return result


@triton.jit
def add_squares(sums, xs):
    """Of each token: the sum so far, and this chunk's squares."""
    result = ()
    for m in tl.static_range(len(xs)):
        result = result + (multiply_add(xs[m], xs[m], sums[m]),)
    return result


@triton.jit
def total_rows(sums):
    """Of each token: the sums of its tile's rows, [ROWS]."""
    result = ()
    for m in tl.static_range(len(sums)):
        result = result + (tl.sum(sums[m], 1),)
    return result


@triton.jit
def small_linear_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, K: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * ROWS to p * ROWS + ROWS of all M tokens. `x` and the weights may be int32, for pairs.

    NORM: x is divided by its root mean square, after the product; every program takes the mean anew, which costs less
    than a kernel that does it once. GATED: the weight is gate and up stacked, `num_rows` rows each, and the output
    silu(gate) * up, both rounded before they meet. RESIDUAL: [M, num_rows], added.
    """
    let_next_start(PDL)
    WIDTH: tl.constexpr = K // 2 if weight_ptr.dtype.element_ty == tl.int32 else K
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = outputs < num_rows
    rows = tl.minimum(outputs, num_rows - 1)  # what is past the last row reads that again, and is not stored
    k = tl.arange(0, CHUNK)[None, :]
    row_ptr = weight_ptr + rows[:, None].to(tl.int64) * WIDTH + k  # [ROWS, CHUNK]
    weights = load_rows(row_ptr, k, WIDTH)
    if GATED:
        up_weights = load_rows(row_ptr + tl.cast(num_rows, tl.int64) * WIDTH, k, WIDTH)
    wait_for_inputs(PDL)
    residuals, sums = (), ()
    for m in tl.static_range(M):
        if RESIDUAL:
            residuals = residuals + (tl.load(residual_ptr + m * num_rows + outputs, mask=kept, other=0).to(tl.float32),)
        sums = sums + (tl.zeros([ROWS, CHUNK], tl.float32),)
    up_sums, squares = sums, sums
    x_row_ptr = x_ptr + k + tl.zeros([ROWS, 1], tl.int32)  # the same in all rows
    for c in tl.static_range(len(weights)):
        xs = ()
        for m in tl.static_range(M):
            xs = xs + (load_chunk(x_row_ptr + m * stride_x, k, c * CHUNK, WIDTH, ""),)
        sums = add_products(sums, weights[c], xs)
        if GATED:
            up_sums = add_products(up_sums, up_weights[c], xs)
        if NORM:
            squares = add_squares(squares, xs)
    totals, up_totals, square_totals = total_rows(sums), total_rows(up_sums), total_rows(squares)
    dtype = out_ptr.dtype.element_ty
    for m in tl.static_range(M):
        inverse = tl.rsqrt(square_totals[m] / K + eps) if NORM else 1.0
        y = totals[m] * inverse
        if GATED:
            gate, up = y.to(dtype).to(tl.float32), (up_totals[m] * inverse).to(dtype).to(tl.float32)
            y = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        if RESIDUAL:
            y += residuals[m]
        tl.store(out_ptr + m * num_rows + outputs, y.to(dtype), mask=kept)


# Warps of a program, its rows, and how many of the warps share each row.
FEW_TOKENS = ((2, 4, 1), (2, 2, 2), (4, 2, 4), (8, 2, 8), (16, 2, 16))
MORE_TOKENS = ((2, 4, 1), (2, 2, 1), (2, 1, 2), (4, 1, 4), (8, 1, 8), (16, 1, 16))
REGISTERS = 80  # of weights, in each thread


def tiling(num_tokens: int, row_bytes: int) -> tuple[int, int, int]:
    """(warps, rows, bytes of a row that are read at a time) of a program; gate and up together are one row here.

    The first tile that leaves a thread with few enough registers of weights, since the sums of each token take some too.
    A thread reads 16 bytes at a time.
    """
    tiles = FEW_TOKENS if num_tokens <= 2 else MORE_TOKENS
    fitting = (tile for tile in tiles if tile[1] * row_bytes <= 4 * REGISTERS * 32 * tile[0])
    warps, rows, sharing = next(fitting, tiles[-1])
    return warps, rows, 16 * 32 * sharing


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [T, K] times the transpose of `weight` [rows, K], for few T (`serves`); accumulated in float32.

    With `norm_eps`, each row of `x` is first divided by its root mean square (RMSNorm without weights). With `gated`,
    `weight` is [2I, K] and the result silu(first half) * second half, [T, I]. With `residual` [T, rows], contiguous,
    that is added. Rows of `x` may be apart; their numbers are not, and `weight` is contiguous.
    """
    num_tokens, width = x.shape
    rows = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, rows)
    num_warps, per_program, chunk = tiling(num_tokens, width * x.itemsize * (1 + gated))
    if x.dtype == torch.bfloat16 and width % 2 == x.stride(0) % 2 == x.storage_offset() % 2 == 0:
        x, weight = x.view(torch.int32), weight.view(torch.int32)
    small_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, weight, out if residual is None else residual, out, x.stride(0), rows, norm_eps or 0.0,
        K=width, NORM=norm_eps is not None, GATED=gated, RESIDUAL=residual is not None, M=num_tokens, ROWS=per_program,
        CHUNK=min(chunk // x.itemsize, triton.next_power_of_2(x.shape[1])), num_warps=num_warps,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out


def serves(num_tokens: int) -> bool:
    """Whether `small_linear` takes a batch of `num_tokens`: a power of two, and few."""
    return num_tokens <= MAX_TOKENS and num_tokens & (num_tokens - 1) == 0 and num_tokens > 0
