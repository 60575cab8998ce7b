"""Matrix times very few rows: what the layers of a decode are at batch 1 to 4.

There is nothing to compute here, only weights to read, and libraries are tuned for larger batches. Three things make this
kernel fast; what each is worth, and what was worth nothing, is in `docs/performance_log.md`:

- A program asks for all its weights before it waits for its inputs, and keeps them in registers.
- Tiles of `x` and of the weights have one shape, so the elements that meet are in the same thread from the start.
- Numbers of 16 bits are read in pairs, as one int32: half as many sums, and a bfloat16 becomes a float32 in one
  instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from folovllm.kernels.pdl import launch_options, let_next_start, wait_for_inputs

MAX_TOKENS = 4  # above, the library's matrix product is better
NARROW = 3072


@triton.jit
def append(items, item):
    """A tuple of tiles, and one more."""
    return items + (item,)  # noqa: RUF005 -- Triton knows no (*items, item)


@triton.jit
def repeat(tile, NUM: tl.constexpr):
    """A tuple of NUM such tiles."""
    tiles = ()
    for _ in tl.static_range(NUM):
        tiles = append(tiles, tile)
    return tiles


@triton.jit
def halves(pair, DTYPE: tl.constexpr):
    """The two numbers of type DTYPE in an int32, as float32. Of bfloat16 the bits are there; only others are zeroed."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        low, high = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = (pair & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def multiply_add(a, b, total, DTYPE: tl.constexpr):
    """total + a * b, element by element, in float32; of pairs, total and both products."""
    if a.dtype == tl.int32:
        a_low, a_high = halves(a, DTYPE)
        b_low, b_high = halves(b, DTYPE)
        total = total + a_low * b_low + a_high * b_high
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
        chunks = append(chunks, load_chunk(row_ptr, k, start, WIDTH, "evict_first"))
    return chunks


@triton.jit
def load_inputs(row_ptr, stride, k, start: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr):
    """Of each token a chunk of `x`, as `load_chunk` reads it."""
    xs = ()
    for m in tl.static_range(M):
        xs = append(xs, load_chunk(row_ptr + m * stride, k, start, WIDTH, ""))
    return xs


@triton.jit
def silu_product(gate, up, DTYPE: tl.constexpr):
    """silu(gate) * up in float32; all three are rounded to DTYPE before they meet."""
    gate, up = gate.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate))).to(DTYPE).to(tl.float32) * up


@triton.jit
def add_products(sums, weights, xs, DTYPE: tl.constexpr):
    """Of each token: the sum so far, and this chunk's products. Tokens are the inner loop: a chunk is unpacked once."""
    result = ()
    for m in tl.static_range(len(xs)):
        result = append(result, multiply_add(weights, xs[m], sums[m], DTYPE))
    return result


@triton.jit
def add_squares(sums, xs, DTYPE: tl.constexpr):
    """Of each token: the sum so far, and this chunk's squares."""
    result = ()
    for m in tl.static_range(len(xs)):
        result = append(result, multiply_add(xs[m], xs[m], sums[m], DTYPE))
    return result


@triton.jit
def total_rows(sums):
    """Of each token: the sums of its tile's rows, [ROWS]."""
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
    """Program p: outputs p * ROWS to p * ROWS + ROWS of all M tokens. `x` and the weights are int32 where they are pairs.

    NORM: x is divided by its root mean square, after the product; every program takes the mean anew, which costs less
    than a kernel that does it once. GATED: the weight is gate and up stacked, `num_rows` rows each, and the output
    silu(gate) * up, both rounded before they meet. RESIDUAL: [M, num_rows], added.
    """
    let_next_start(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    WIDTH: tl.constexpr = K // 2 if weight_ptr.dtype.element_ty == tl.int32 else K
    outputs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    kept = outputs < num_rows
    rows, k = tl.minimum(outputs, num_rows - 1), tl.arange(0, CHUNK)[None, :]  # past the last row that again
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


REGISTERS = 80  # of weights, in each thread: the sums of each token take some too
MAX_WARPS = 16
MANY_ROWS = 1 << 14


def tiling(num_tokens: int, num_rows: int, row_bytes: int) -> tuple[int, int, int]:
    """(warps, rows, elements of a row that are read at a time) of a program; gate and up together are one row here.

    Two rows at a time, so that each piece of `x` serves twice; with more than two tokens long rows come singly, to leave
    registers to the sums. As many warps share them as REGISTERS asks for, each thread reading 16 bytes. Where one warp is
    enough, two work side by side if there would be too many programs otherwise, or the tokens keep each busy for long.
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
    """`x` [T, K] times the transpose of `weight` [rows, K], for few T (`serves`); accumulated in float32.

    With `norm_eps`, each row of `x` is first divided by its root mean square (RMSNorm without weights). With `gated`,
    `weight` is [2I, K] and the result silu(first half) * second half, [T, I]. With `residual` [T, rows], contiguous,
    that is added. Rows of `x` may be apart; their numbers are not, and `weight` is contiguous. The result is written to
    `out`, contiguous, if that is given.
    """
    num_tokens, width = x.shape
    rows = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(num_tokens, rows) if out is None else out
    num_warps, per_program, chunk = tiling(num_tokens, rows, width * x.itemsize * (1 + gated))
    if x.itemsize == 2 and width % 2 == x.stride(0) % 2 == x.storage_offset() % 2 == weight.storage_offset() % 2 == 0:
        x, weight = x.view(torch.int32), weight.view(torch.int32)
    skinny_linear_kernel[(triton.cdiv(rows, per_program),)](
        x, weight, out if residual is None else residual, out, x.stride(0), rows, norm_eps or 0.0,
        K=width, NORM=norm_eps is not None, GATED=gated, RESIDUAL=residual is not None, M=num_tokens, ROWS=per_program,
        CHUNK=min(chunk, triton.next_power_of_2(x.shape[1])), num_warps=num_warps,
        **launch_options(x.device, num_tokens),
    )  # fmt: skip
    return out


def serves(num_tokens: int, weight: torch.Tensor) -> bool:
    """Whether `skinny_linear` is the product to take for so many tokens: a power of two, and few.

    Four only where the weight has a narrow side, which in a model's layers is the width of its stream. A thread adds up
    for each token by itself, and with so many tokens wide layers do better on the library's tensor cores.
    """
    return num_tokens in (1, 2) or (num_tokens == MAX_TOKENS and min(weight.shape) <= NARROW)
