"""Quantized weights on the tensor cores, which take floats of 16 bits: unpacked on the way.

With some tokens, each program unpacks the weights that it needs, so only these are read (`quant_matmul`). With thousands every
weight would be unpacked again and again: then all of them are, once, and the library multiplies (`unpacked`).

Weights of 4 bits come as words. A tile of words is eight tiles of weights, one for each place in a word, and each meets its own
inputs: no weight has to move to another thread. And the scale of a group meets sums, where it can: a weight that is multiplied
first would go to the tensor cores by way of shared memory, behind a barrier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from folovllm.electives.quantization.kernels.int4_linear import EXPONENT, code, load_scales
from folovllm.electives.quantization.kernels.unpack_codes import in_turn, nibble
from folovllm.electives.quantization.weight import QuantizedWeight, kind_of
from folovllm.kernels.fp8_cache import INTERPRETED
from folovllm.kernels.skinny_linear import append
from folovllm.kernels.split_sum import counters, num_parts, parts_for, store_sum, token_tiles
from folovllm.kernels.variants import capability_of

MANY = 129  # tokens, from which on weights are unpacked first: a second tile would unpack all of them again
MANY_IN_SHORT_GROUPS = 64  # with 4 bits in groups of other sizes, which take an H200 four times as long as those of 128
MANY_IN_GROUPS = 769  # with 4 bits on Hopper, where that is hidden behind the tensor cores' work
GROUP = 128  # inputs, for which that was measured

# Two numbers of FP8, bytes 0 and 1 of $1, as bfloat16: the bits of a bfloat16 whose exponent counts from another number, 120
# less. The instruction that converts to bfloat16 takes one number at a time, at an eighth of the rate of what is here.
PAIR_TO_BFLOAT16 = tl.constexpr("""{ .reg .b32 both, bits, power, zero;
    cvt.u32.u16 both, $1;
    prmt.b32 both, both, 0, 0x1404;
    shr.u32 bits, both, 4;
    and.b32 bits, bits, 0x07F007F0;
    mov.b32 zero, 0x80008000;
    lop3.b32 bits, both, zero, bits, 0xEA;
    mov.b32 power, 0x7B807B80;
    fma.rn.bf16x2 $0, bits, power, zero; }""")


@triton.jit
def unpack(numbers, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes as numbers of DTYPE, not yet multiplied by their scales. All numbers of 8 bits are exact in any DTYPE."""
    if KIND == "int8":
        numbers = numbers.to(DTYPE)
    elif DTYPE == tl.bfloat16 and not INTERPRETED:  # noqa: SIM300
        numbers = tl.inline_asm_elementwise(PAIR_TO_BFLOAT16, "=r,h", [numbers], tl.bfloat16, True, 2)
    elif KIND == "fp8":
        numbers = numbers.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    else:  # the bits of a float16 whose exponent counts from another number: 8 less
        wide = numbers.to(tl.int16)
        numbers = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        numbers = (numbers * 256.0).to(DTYPE)
    return numbers


@triton.jit
def inputs_of(tile, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """Which inputs a tile of words has, [8 * WORDS], in the order in which `weights_of` has their weights."""
    OF_GROUP: tl.constexpr = GROUP // 8  # words
    k = tl.arange(0, 8 * WORDS)
    word = tile * WORDS + k % WORDS
    return tile * GROUP + k if OF_GROUP == WORDS else word // OF_GROUP * GROUP + k // WORDS * OF_GROUP + word % OF_GROUP


@triton.jit
def codes_of(words, zero, exponent, DTYPE: tl.constexpr):
    """The codes [rows, 8 * WORDS] of words [rows, WORDS], less `zero`: whole numbers, which are exact."""
    tiles = ()
    for i in tl.static_range(8):
        numbers = nibble(words, i, exponent, DTYPE)
        tiles = append(tiles, numbers if zero is None else numbers - zero)
    return in_turn(tiles)


@triton.jit
def weights_of(words, scale, offset, exponent, DTYPE: tl.constexpr):
    """The weights [rows, 8 * WORDS] of words [rows, WORDS]. Of several groups each word has its own scale."""
    tiles = ()
    for i in tl.static_range(8):
        numbers = code(words, i, exponent) * scale
        tiles = append(tiles, (numbers if offset is None else numbers + offset).to(DTYPE))
    return in_turn(tiles)


@triton.jit
def load_inputs(x_ptr, tile, K: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, TILE_K: tl.constexpr):
    """The inputs [TILE_K, tokens] that a tile of weights meets. `x_ptr` [1, tokens] is where those of each token begin."""
    k = inputs_of(tile, GROUP, TILE_K // 8) if KIND == "int4" else tile * TILE_K + tl.arange(0, TILE_K)
    if K % TILE_K == 0:  # noqa: SIM108
        x = tl.load(x_ptr + k[:, None])
    else:
        x = tl.load(x_ptr + k[:, None], mask=k[:, None] < K, other=0)
    return x


@triton.jit
def add_words(
    total, x, word_ptr, scale_ptr, zero_ptr, rows, tile, exponent, K: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `add_tile`, of WORDS words of 4-bit weights. A scale meets the sum of the products, where a tile is of one group and
    zeros, if any, are codes; else it meets the weights.
    """
    OF_GROUP: tl.constexpr = GROUP // 8  # words
    word = tile * WORDS + tl.arange(0, WORDS)[None, :]
    if K % (8 * WORDS) == 0:
        words = tl.load(word_ptr + rows * (K // 8) + word)
    else:  # behind the last word are inputs behind the last one, which are zeros
        words = tl.load(word_ptr + rows * (K // 8) + word, mask=word < K // 8, other=0)
    if OF_GROUP % WORDS == 0 and (zero_ptr is None or zero_ptr.dtype.element_ty == tl.uint8):
        at, zero = rows * (K // GROUP) + tile // (OF_GROUP // WORDS), None
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + at).to(x.dtype) - 8
        part = tl.dot(codes_of(words, zero, exponent, x.dtype), x, input_precision=PRECISION)
        total += part * tl.load(scale_ptr + at).to(tl.float32)
    else:
        at = rows * (K // GROUP) + word // OF_GROUP
        scale, offset = load_scales(scale_ptr, zero_ptr, at, word < K // 8)
        weights = weights_of(words, scale, None if zero_ptr is None else offset, exponent, x.dtype)
        total = tl.dot(weights, x, total, input_precision=PRECISION)
    return total


@triton.jit
def add_tile(
    total, x, weight_ptr, scale_ptr, zero_ptr, rows, tile, scale, exponent, K: tl.constexpr, GROUP_ROWS: tl.constexpr,
    GROUP: tl.constexpr, KIND: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """`total` [TILE_N, TILE_M], and the products of a tile of inputs with weights of some `rows` [TILE_N, 1].

    `x` is what `load_inputs` gives. `scale` [TILE_N, 1] is that of whole rows (`scale_of_rows`).
    The weights are the first factor: on Hopper only that may come from registers, in which they are unpacked. Each tile's
    product meets its scale at once, which makes the program wait for it. Products that follow each other without that
    would have their weights overwritten while the tensor cores still read them (github.com/triton-lang/triton/issues/9433).
    """
    PRECISION: tl.constexpr = "ieee" if x.dtype == tl.float32 else "tf32"
    if KIND == "int4":
        total = add_words(
            total, x, weight_ptr, scale_ptr, zero_ptr, rows, tile, exponent, K, GROUP, TILE_K // 8, PRECISION
        )
    else:
        k = tile * TILE_K + tl.arange(0, TILE_K)[None, :]
        if K % TILE_K == 0:
            numbers = tl.load(weight_ptr + rows * K + k)
        else:
            numbers = tl.load(weight_ptr + rows * K + k, mask=k < K, other=0)
        numbers = unpack(numbers, KIND, x.dtype)
        if GROUP < K:  # a tile lies within a group
            scale = tl.load(scale_ptr + rows // GROUP_ROWS * tl.cdiv(K, GROUP) + tile * TILE_K // GROUP)
        total += tl.dot(numbers, x, input_precision=PRECISION) * scale
    return total


@triton.jit
def scale_of_rows(
    scale_ptr, rows, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """The scales of `rows` [TILE_N, 1] if each has one for all inputs; else 1, for `add_tile` finds those of a tile."""
    return 1.0 if KIND == "int4" or GROUP < K else tl.load(scale_ptr + rows // GROUP_ROWS)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def quant_matmul_kernel(
    x_place, weight_ptr, scale_ptr, zero_ptr, residual_ptr, part_ptr, done_ptr, out_ptr, stride_x, num_tokens, num_parts, exponent,
    OUTPUTS: tl.constexpr, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    RESIDUAL: tl.constexpr, FETCHED: tl.constexpr, SPLIT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program (q, p, s): outputs p * BN to p * BN + BN of tokens q * BM to q * BM + BM; SPLIT: part s of num_parts of the tiles
    of BK inputs. FETCHED: `x_place` is a descriptor, from which the copy engine fetches tiles (TMA); else a pointer.
    """
    token = tl.program_id(0) * BM
    rows = tl.minimum(tl.program_id(1) * BN + tl.arange(0, BN), OUTPUTS - 1).to(tl.int64)[:, None]
    if not FETCHED:
        x_place += tl.minimum(token + tl.arange(0, BM), num_tokens - 1)[None, :].to(tl.int64) * stride_x
    acc = tl.zeros([BN, BM], tl.float32)
    scale = scale_of_rows(scale_ptr, rows, K, GROUP_ROWS, GROUP, KIND)
    TILES: tl.constexpr = tl.cdiv(K, BK)
    first, end = 0, TILES
    if SPLIT:
        first, end = tl.program_id(2) * TILES // num_parts, (tl.program_id(2) + 1) * TILES // num_parts
    for tile in range(first, end):
        x = x_place.load([token, tile * BK]).T if FETCHED else load_inputs(x_place, tile, K, GROUP, KIND, BK)
        acc = add_tile(
            acc, x, weight_ptr, scale_ptr, zero_ptr, rows, tile, scale, exponent, K, GROUP_ROWS, GROUP, KIND, BK
        )
    store_sum(
        acc, part_ptr, done_ptr, residual_ptr, out_ptr, num_tokens, num_parts, OUTPUTS, SPLIT, RESIDUAL)  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def unpack_kernel(
    weight_ptr, scale_ptr, zero_ptr, out_ptr, num_rows, exponent, K: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (p, q): the weights of outputs p * ROWS to p * ROWS + ROWS for inputs q * BLOCK to q * BLOCK + BLOCK.

    Of 4 bits in groups of 128, a program unpacks the words of one group. Of shorter groups neighbouring threads write
    neighbouring inputs, and eight of them read the same word, which lies in the L1 cache by then.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (k < K)
    WORDS: tl.constexpr = GROUP // 8  # of a group
    if KIND == "int4" and GROUP == BLOCK:
        word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
        words = tl.load(weight_ptr + row * (K // 8) + word, mask=row < num_rows, other=0)
        scale, offset = load_scales(scale_ptr, zero_ptr, row * (K // GROUP) + tl.program_id(1), row < num_rows)
        weights = weights_of(words, scale, None if zero_ptr is None else offset, exponent, out_ptr.dtype.element_ty)
    elif KIND == "int4":
        words = tl.load(weight_ptr + row * (K // 8) + k // GROUP * WORDS + k % WORDS, mask=inside, other=0)
        scale, offset = load_scales(scale_ptr, zero_ptr, row * (K // GROUP) + k // GROUP, inside)
        weights = ((words >> 4 * (k % GROUP // WORDS) & 15) - 8).to(tl.float32) * scale
        if zero_ptr is not None:
            weights += offset
    else:
        numbers = unpack(tl.load(weight_ptr + row * K + k, mask=inside, other=0), KIND, tl.float32)
        weights = numbers * tl.load(
            scale_ptr + row // GROUP_ROWS * tl.cdiv(K, GROUP) + k // GROUP, mask=inside, other=0.0
        )
    tl.store(out_ptr + row * K + k, weights.to(out_ptr.dtype.element_ty), mask=inside)


def kernel_config(num_tokens: int, width: int, group: int, kind: str, itemsize: int, capability: int) -> dict[str, int]:
    """Return tokens, outputs and inputs of a program's tile, its warps, how many tiles are on their way, and programs that there
    should be: of 8 bits what was fastest on an H200, of 4 bits chosen by registers and memory.

    With few tokens a program has few outputs, so that there are enough programs to keep the memory busy, and each asks for
    many inputs at a time. A tile of 8 bits lies within a `group` of inputs, one of words where a group has at least as many. Of float32, of which an item has 4 bytes, there is one tile at a time: small
    cards have no shared memory for more.
    """
    m = max(16, triton.next_power_of_2(num_tokens)) if num_tokens <= 64 else 128
    shape = {"BM": m, "BN": 64, "num_warps": 4, "num_stages": 3}
    if kind == "int4":
        words = 16 if capability >= 80 else 4  # without tensor cores registers hold no more
        shape |= {"BM": m if capability >= 90 else min(m, 64), "BK": 8 * words, "programs": 264 if m > 64 else 396}
    elif m <= 64:
        shape |= {"BK": 128, "programs": 264, "num_stages": 4 if m == 16 else 3}
    else:  # before Hopper, `x` is in registers too
        shape |= {"BN": 128, "BK": 64 if capability >= 90 else 32, "num_warps": 8, "programs": 132}
    if kind != "int4":
        within = group & -group if group < width else triton.next_power_of_2(width)
        shape["BK"] = min(shape["BK"], within)
    return shape | ({"num_stages": 1} if itemsize == 4 else {})


def can_fetch(x: torch.Tensor, inputs: int) -> bool:
    """Return whether the copy engine of the card reads tiles of `x` with so many inputs: on Hopper, from places that it likes."""
    aligned = x.stride(1) == 1 and x.data_ptr() % 16 == x.stride(0) * x.itemsize % 16 == 0
    return capability_of(x.device) >= 90 and x.itemsize == 2 and aligned and inputs >= 64


def quant_matmul(x: torch.Tensor, weight: QuantizedWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [T, inputs] times the transpose of W, plus `residual` [T, outputs]; accumulated in float32."""
    num_tokens, width = x.shape
    rows, kind = len(weight.weight), kind_of(weight.weight)
    out = x.new_empty(num_tokens, rows)
    shape = kernel_config(num_tokens, width, weight.columns, kind, x.itemsize, capability_of(x.device))
    row_tiles, programs = triton.cdiv(rows, shape["BN"]), shape.pop("programs")
    most = width // (4 * shape["BK"])  # four tiles are worth a program
    parts = num_parts(row_tiles * token_tiles(num_tokens, shape["BM"]), programs, most)
    fetched = can_fetch(x, shape["BK"]) and (kind != "int4" or shape["BK"] == weight.columns)
    x_place = TensorDescriptor.from_tensor(x, [shape["BM"], shape["BK"]]) if fetched else x
    quant_matmul_kernel[(triton.cdiv(num_tokens, shape["BM"]), row_tiles, parts)](
        x_place, weight.stored, weight.scale, weight.zeros, out if residual is None else residual, parts_for(x, out, parts),
        counters(x.device), out, x.stride(0), num_tokens, parts, EXPONENT, OUTPUTS=rows, K=width, GROUP_ROWS=weight.rows,
        GROUP=weight.columns, KIND=kind, RESIDUAL=residual is not None, FETCHED=fetched, SPLIT=parts > 1, **shape,
    )  # fmt: skip
    return out


def unpacked(weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return W [outputs, inputs] in `dtype`."""
    (rows, elements), kind = weight.weight.shape, kind_of(weight.weight)
    width, lines, block = (8 if kind == "int4" else 1) * elements, 8, 512
    if kind == "int4" and weight.columns == GROUP:
        lines, block = 64, GROUP
    out = torch.empty(rows, width, dtype=dtype, device=weight.weight.device)
    unpack_kernel[(triton.cdiv(rows, lines), triton.cdiv(width, block))](
        weight.stored, weight.scale, weight.zeros, out, rows, EXPONENT, K=width, GROUP_ROWS=weight.rows, GROUP=weight.columns,
        KIND=kind, ROWS=lines, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


def multiply(x: torch.Tensor, weight: QuantizedWeight, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Return the product, and maybe write over `residual`; by the library if there are so many tokens that the tensor cores are
    busy for longer than it takes to unpack. It has the weights in the dtype of `x` for as long as that takes.
    """
    many = MANY
    if kind_of(weight.weight) == "int4" and weight.columns != GROUP:
        many = MANY_IN_SHORT_GROUPS
    elif kind_of(weight.weight) == "int4" and can_fetch(x, GROUP):
        many = MANY_IN_GROUPS
    if len(x) < many:
        return quant_matmul(x, weight, residual)
    dense = unpacked(weight, x.dtype)
    return torch.nn.functional.linear(x, dense) if residual is None else residual.addmm_(x, dense.t())
