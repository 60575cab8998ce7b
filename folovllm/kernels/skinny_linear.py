"""Skinny GEMM: a weight matrix times 1 to 4 rows, as in the linear layers of a small decode.

Reading the weights takes all of the time, and libraries are tuned for larger batches. Three things make this kernel fast.
`docs/performance_log.md` has the gain of each, and what gained nothing:

- A program loads all its weights before it waits for its inputs, and keeps them in registers.
- Tiles of `x` and of the weights have the same shape, so the factors of each product are in the same thread.
- Numbers of 16 bits are read in pairs, as one int32. That halves the number of sums, and one instruction converts a bfloat16
  to float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs

MAX_TOKENS = 4  # for more the library's matrix product is faster
NARROW = 3072


@triton.jit
def append(items, item):
    """Return a tuple with one more item."""
    return items + (item,)  # noqa: RUF005 -- Triton knows no (*items, item)


@triton.jit
def repeat(tile, NUM: tl.constexpr):
    """Return a tuple that holds `tile` NUM times."""
    tiles = ()
    for _ in tl.static_range(NUM):
        tiles = append(tiles, tile)
    return tiles


@triton.jit
def halves(pair, DTYPE: tl.constexpr):
    """Return the two numbers of type DTYPE in an int32, as float32. For bfloat16 only the other half's bits must be cleared."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        low, high = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = (pair & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def multiply_add(a, b, total, DTYPE: tl.constexpr):
    """Return total + a * b for each element, in float32. For pairs it adds both products."""
    if a.dtype == tl.int32:
        a_low, a_high = halves(a, DTYPE)
        b_low, b_high = halves(b, DTYPE)
        total = total + a_low * b_low + a_high * b_high
    else:
        total += a.to(tl.float32) * b.to(tl.float32)
    return total


@triton.jit
def load_chunk(row_ptr, k, start: tl.constexpr, WIDTH: tl.constexpr, POLICY: tl.constexpr):
    """Return columns start + k of some rows; `row_ptr` points to their column k. Columns past WIDTH are zero (masked only if needed)."""
    if start + k.shape[1] <= WIDTH:
        chunk = tl.load(row_ptr + start, eviction_policy=POLICY)
    else:
        chunk = tl.load(row_ptr + start, mask=k < WIDTH - start, other=0, eviction_policy=POLICY)
    return chunk


@triton.jit
def load_rows(row_ptr, k, WIDTH: tl.constexpr):
    """Return all chunks of some rows of weights. Each is read once, so it is evicted from caches first, before `x`."""
    chunks = ()
    for start in tl.static_range(0, WIDTH, k.shape[1]):
        chunks = append(chunks, load_chunk(row_ptr, k, start, WIDTH, "evict_first"))
    return chunks


@triton.jit
def load_inputs(row_ptr, stride, k, start: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr):
    """Return a chunk of `x` for each token (see `load_chunk`)."""
    xs = ()
    for m in tl.static_range(M):
        xs = append(xs, load_chunk(row_ptr + m * stride, k, start, WIDTH, ""))
    return xs


@triton.jit
def silu_product(gate, up, DTYPE: tl.constexpr):
    """Return silu(gate) * up in float32. Gate, up and silu(gate) are rounded to DTYPE first."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up


@triton.jit
def add_products(sums, weights, xs, DTYPE: tl.constexpr):
    """Add this chunk's products to each token's sum. Tokens are the inner loop, so a chunk of weights is unpacked once."""
    result = ()
    for m in tl.static_range(len(xs)):
        result = append(result, multiply_add(weights, xs[m], sums[m], DTYPE))
    return result


@triton.jit
def add_squares(sums, xs, DTYPE: tl.constexpr):
    """Add this chunk's squares to each token's sum."""
    result = ()
    for m in tl.static_range(len(xs)):
        result = append(result, multiply_add(xs[m], xs[m], sums[m], DTYPE))
    return result


@triton.jit
def total_rows(sums):
    """Return the row sums of each token's tile, [ROWS]."""
    result = ()
    for m in tl.static_range(len(sums)):
        result = append(result, tl.sum(sums[m], 1))
    return result


@triton.jit
def skinny_linear_kernel(
    x_ptr, weight_ptr, residual_ptr, out_ptr, stride_x, num_rows, eps, K: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program p: outputs p * ROWS to p * ROWS + ROWS of all M tokens. `x` and the weights are int32 if they hold pairs.

    NORM: the product is divided by the root mean square of x. Every program computes it again, which costs less than a kernel
    that computes it once. GATED: the weight is gate and up stacked, `num_rows` rows each, and the output is silu(gate) * up,
    both rounded before the product. RESIDUAL: [M, num_rows], added.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = K // 2 if weight_ptr.dtype.element_ty == tl.int32 else K
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = outputs < num_rows
    rows, k = tl.minimum(outputs, num_rows - 1), tl.arange(0, CHUNK)[None, :]  # outputs past the last row read it again
    row_ptr = weight_ptr + rows[:, None].to(tl.int64) * WIDTH + k  # [ROWS, CHUNK]
    weights = load_rows(row_ptr, k, WIDTH)
    if GATED:
        up_weights = load_rows(row_ptr + tl.cast(num_rows, tl.int64) * WIDTH, k, WIDTH)
    wait_for_inputs(PDL)
    residuals = ()
    for m in tl.static_range(M if RESIDUAL else 0):
        residual = tl.load(residual_ptr + m * num_rows + outputs, mask=kept, other=0)
        residuals = append(residuals, residual.to(tl.float32))
    sums = repeat(tl.zeros([ROWS, CHUNK], tl.float32), M)
    up_sums, squares = sums, sums
    x_row_ptr = x_ptr + k + tl.zeros([ROWS, 1], tl.int32)  # the same in all rows
    for c in tl.static_range(len(weights)):
        xs = load_inputs(x_row_ptr, stride_x, k, c * CHUNK, WIDTH, M)
        sums = add_products(sums, weights[c], xs, DTYPE)
        if GATED:
            up_sums = add_products(up_sums, up_weights[c], xs, DTYPE)
        if NORM:
            squares = add_squares(squares, xs, DTYPE)
    totals, up_totals, square_totals = total_rows(sums), total_rows(up_sums), total_rows(squares)
    for m in tl.static_range(M):
        inverse = tl.rsqrt(square_totals[m] / K + eps) if NORM else 1.0
        y = totals[m] * inverse
        if GATED:
            y = silu_product(y, up_totals[m] * inverse, DTYPE)
        if RESIDUAL:
            y += residuals[m]
        tl.store(out_ptr + m * num_rows + outputs, y.to(DTYPE), mask=kept)


REGISTERS = 80  # of a thread, for weights; the sums of each token need registers, too
MAX_WARPS = 16
MANY_ROWS = 1 << 14


def kernel_config(num_tokens: int, num_rows: int, row_bytes: int) -> tuple[int, int, int]:
    """Return (warps, rows, elements of a row that are read at a time) of a program. Gate and up together count as one row.

    A program has two rows, so that each chunk of `x` is used twice. With more than two tokens a long row comes alone, to leave
    registers for the sums. The number of warps follows from REGISTERS, with 16 bytes a read of a thread. If one warp is enough,
    a program has two with their own rows, where there would be too many programs or much work for each.
    """
    rows = 1 if num_tokens > 2 and row_bytes > 8192 else 2
    sharing = min(MAX_WARPS, triton.next_power_of_2(triton.cdiv(rows * row_bytes, 4 * REGISTERS * 32)))
    beside = 2 if sharing == 1 and (num_tokens > 2 or num_rows > MANY_ROWS) else 1
    return sharing * beside, rows * beside, 4 * 32 * sharing


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_eps: float | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `x` [T, K] times the transpose of `weight` [rows, K], for few T (`is_supported`). Sums are float32.

    With `norm_eps`, each row of `x` is first divided by its root mean square (RMSNorm without weights). With `gated`, `weight` is
    [2I, K] and the result is silu(first half) * second half, [T, I]. `residual` [T, rows], contiguous, is added. Rows of `x` may
    have any stride, their numbers are contiguous, and so is `weight`. The result is written to `out`, contiguous, if given.
    """
    num_tokens, width = x.shape
    rows = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, rows) if out is None else out
    num_warps, per_program, chunk = kernel_config(num_tokens, rows, width * x.itemsize * (1 + gated))
    if x.itemsize == 2 and width % 2 == x.stride(0) % 2 == x.storage_offset() % 2 == weight.storage_offset() % 2 == 0:
        x, weight = x.view(torch.int32), weight.view(torch.int32)
    skinny_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, weight, out if residual is None else residual, out, x.stride(0), rows, norm_eps or 0.0,
        K=width, NORM=norm_eps is not None, GATED=gated, RESIDUAL=residual is not None, M=num_tokens, ROWS=per_program,
        CHUNK=min(chunk, triton.next_power_of_2(x.shape[1])), num_warps=num_warps,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out


def is_supported(num_tokens: int, weight: torch.Tensor) -> bool:
    """Return whether `skinny_linear` is the faster product for this number of tokens: 1, 2, or 4 with a narrow weight.

    The narrow side is the hidden size in most layers. A thread sums for each token separately. So with four tokens wide layers
    are faster on the library's tensor cores.
    """
    return num_tokens in (1, 2) or (num_tokens == MAX_TOKENS and min(weight.shape) <= NARROW)
