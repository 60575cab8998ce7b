"""Compile a milestone's kernels for each compute capability with no GPU.

Prints a JSON object: for each capability a list of objects, one a variant: its kernel, shape, warps, registers of a thread, bytes of stack, where what
does not fit into registers goes, bytes of shared memory, and those that the card has for one block.

A program of its own, because Triton decides when it is first imported whether kernels are compiled or interpreted:
    python tests/m4/offline_compile.py m4
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.language import NVMMASharedLayout

from folovllm.distributed.one_shot_buffers import VALUES
from folovllm.hopper import grouped as grouped_hopper
from folovllm.hopper.int4 import NUM_STAGES as STAGES_OF_TOKENS
from folovllm.hopper.int4 import int4_hopper_kernel
from folovllm.hopper.prefill import NUM_STAGES, prefill_hopper_kernel
from folovllm.kernels import prefetching_decode
from folovllm.kernels.activation import act_and_mul_kernel
from folovllm.kernels.decode import MAX_PARTS, DecodeConfig, decode_kernel
from folovllm.kernels.decode_plan import plan_kernel
from folovllm.kernels.filter_logits import CAPACITY, CHUNK, WARPS, WIDE_CHUNK, finish_kernel, scan_kernel
from folovllm.kernels.gumbel_max import TILE, best_of_tiles_kernel, gumbel_max_kernel
from folovllm.kernels.mask_logits import WIDTH as MASKED
from folovllm.kernels.mask_logits import mask_logits_kernel
from folovllm.kernels.prefill import prefill_config, prefill_kernel
from folovllm.kernels.prefill_tiles import list_tiles_kernel
from folovllm.kernels.qk_norm_rope import qk_norm_rope_store_kernel
from folovllm.kernels.record_sampled import record_sampled_kernel
from folovllm.kernels.rms_norm import add_rms_norm_kernel, deferred_add_rms_norm_kernel
from folovllm.kernels.sample_tokens import plain_kernel, special_kernel
from folovllm.kernels.skinny_linear import serves, skinny_linear_kernel, tiling
from folovllm.kernels.store import store_kvcache_kernel
from folovllm.kernels.summed_linear import fits, summed_linear_kernel
from folovllm.kernels.unpack_step import unpack_decode_kernel, unpack_ragged_kernel
from folovllm.moe.kernels.grouped_linear import grouped_linear_kernel, tiles_for
from folovllm.moe.kernels.moe_gemv import moe_gemv_kernel
from folovllm.moe.kernels.moe_gemv import tiling as tiling_of_pairs
from folovllm.moe.kernels.route import STEP, choose_kernel, combine_kernel, late_combine_kernel, order_kernel
from folovllm.quantization.kernels.grouped_quant import grouped_quant_kernel
from folovllm.quantization.kernels.grouped_quant import tiles as tiles_of_experts
from folovllm.quantization.kernels.int4_linear import int4_linear_kernel
from folovllm.quantization.kernels.int4_linear import tiling as tiling_4
from folovllm.quantization.kernels.integer_gemv import integer_gemv_kernel, takes
from folovllm.quantization.kernels.integer_gemv import tile_of as tile_of_integers
from folovllm.quantization.kernels.quant_gemv import quant_gemv_kernel
from folovllm.quantization.kernels.quant_gemv import tile_of as tile_of_gemv
from folovllm.quantization.kernels.quant_matmul import quant_matmul_kernel, tiles, unpack_kernel
from folovllm.quantization.kernels.quantize_rows import quantize_rows_kernel
from folovllm.spec_decode.kernels.verify_attention import (
    MERGED,
    list_verify_tiles_kernel,
    merge_verify_kernel,
    num_warps_of,
    plan_verify_kernel,
    tile_shape,
    verify_config,
    verify_kernel,
)

# (D, B) to compile for: those that ask for the most where the limit is low, and few where compiling is slow.
SHAPES = {75: [(128, 16)], 80: [(128, 16)], 86: [(128, 16), (256, 256)], 89: [(128, 16)],
          90: [(64, 256), (128, 16), (256, 256)]}  # fmt: skip
# Triton makes of a kernel what it makes for sm_80: only what is launched otherwise is compiled anew.
AS_AMPERE = (86, 89)
# Most shared memory one block may ask for, in KiB (CUDA C++ Programming Guide, table of compute capabilities).
LIMIT_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227}
HQ, HKV = 16, 8
WINDOW = 1024  # of a layer that has one


OWN_TYPES = {("decode_kernel", "sum_ptr"): "*fp32", ("prefetching_decode_kernel", "sum_ptr"): "*fp32", ("verify_kernel", "sum_ptr"): "*fp32", ("merge_verify_kernel", "sum_ptr"): "*fp32", ("scan_kernel", "weight_ptr"): "*fp32",
             ("finish_kernel", "weight_ptr"): "*fp32", ("finish_kernel", "token_ptr"): "*i32",
             ("skinny_linear_kernel", "x_ptr"): "*i32", ("skinny_linear_kernel", "weight_ptr"): "*i32",
             ("quant_gemv_kernel", "scale_ptr"): "*fp32", ("integer_gemv_kernel", "scale_ptr"): "*fp32", ("integer_gemv_kernel", "zero_ptr"): "*u8",
             ("summed_linear_kernel", "x_ptr"): "*i32", ("summed_linear_kernel", "weight_ptr"): "*i32",
             ("moe_gemv_kernel", "x_ptr"): "*i32", ("moe_gemv_kernel", "weight_ptr"): "*i32",
             ("choose_kernel", "count_ptr"): "*i16", ("order_kernel", "count_ptr"): "*i16",
             ("int4_linear_kernel", "scale_ptr"): "*fp16",
             ("int4_hopper_kernel", "zero_ptr"): "*u8", ("int4_hopper_kernel", "part_ptr"): "*fp32",
             ("quant_matmul_kernel", "part_ptr"): "*fp32", ("quantize_rows_kernel", "code_ptr"): "*fp8e4nv",
             ("quantize_rows_kernel", "scale_ptr"): "*fp32"}  # fmt: skip


WEIGHTS = {"code_ptr": "codes", "weight_ptr": "codes", "scale_ptr": "scales"}
IN_8_BITS = {"codes": "i8", "scales": "fp32", "zero_ptr": None}
CACHES = {("decode_kernel", "k_ptr"), ("decode_kernel", "v_ptr"), ("verify_kernel", "k_ptr"), ("verify_kernel", "v_ptr"), ("prefill_kernel", "k_ptr"), ("prefill_kernel", "v_ptr"),
          ("qk_norm_rope_store_kernel", "k_cache_ptr"), ("qk_norm_rope_store_kernel", "v_cache_ptr")}  # fmt: skip


def pointer_type(name: str, dtype: str) -> str:
    """The element type behind a kernel's pointer argument."""
    if name in (
        "order_ptr",
        "starts_ptr",
        "experts_ptr",
        "slot_ptr",
        "position_ptr",
        "token_ptr",
        "last_token_ptr",
        "input_ptr",
    ):
        return "*i64"
    if name in ("table_ptr", "start_ptr", "len_ptr", "item_ptr", "header_ptr", "queue_ptr", "done_ptr", "at_ptr",
                "field_ptr", "batch_table_ptr", "seed_low_ptr", "seed_high_ptr", "row_ptr", "word_ptr", "counts_ptr",
                "hot_ptr", "id_ptr", "last_ptr", "sampled_ptr", "given_ptr", "query_len_ptr", "tile_ptr", "place_ptr", "end_ptr",
                "count_ptr", "mask_ptr", "number_ptr"):  # fmt: skip
        return "*i32"
    if name in ("max_ptr", "acc_ptr", "cos_sin_ptr", "best_ptr", "temperature_ptr", "largest_ptr",
                "value_ptr", "offset_ptr", "scaled_ptr", "threshold_ptr"):  # fmt: skip
        return "*fp32"
    return f"*{dtype}"


def compile_kernel(kernel, capability: int, dtype: str, constants: dict, num_warps=4, num_stages=2) -> dict[str, int]:
    """What `kernel` takes of sm_`capability`, its pointers and strides 16-byte aligned. `cache` among the constants is the
    dtype of K/V, if it has one of its own, and `dtype` another than is usual; `codes` and `scales` those of weights; `tokens` how many a box has.
    """
    constants, signature, attributes = dict(constants), {}, {}
    dtype = constants.pop("dtype", dtype)
    cache, most = constants.pop("cache", dtype), constants.pop("maxnreg", None)
    tokens = constants.pop("tokens", None)
    weights = {name: constants[kind] for name, kind in WEIGHTS.items() if kind in constants}
    constants = {name: value for name, value in constants.items() if name not in WEIGHTS.values()}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_desc") and not isinstance(kernel, GluonJITFunction):
            signature[name] = f"tensordesc<{dtype}[{constants['PARTS']}, {constants['TILE_N']}, {constants['TILE_K']}]>"
        elif name.endswith("_desc"):
            box = f"{dtype}[{tokens or min(constants['B'], 128)}, 64]"
            signature[name] = f"tensordesc<{box},{NVMMASharedLayout(128, 16, 2)!r}>"
        elif name == "buffer_ptrs":  # of two ranks
            signature[name] = ("*i64", "*i64")
            attributes |= {(index, rank): [["tt.divisibility", 16]] for rank in range(2)}
        elif name.endswith("_ptr"):
            place = kernel.__name__, name
            own = f"*{cache}" if place in CACHES else OWN_TYPES.get(place)
            own = f"*{weights[name]}" if name in weights else own
            signature[name] = own or pointer_type(name, dtype)
        else:
            signature[name] = (
                "fp32" if name in ("scale", "eps", "stream_eps", "v_scale", "k_factor", "v_factor") else "i32"
            )
        aligned = (
            str(signature[name]).startswith("*")
            or name in ("vocab_size", "N")
            or (name.startswith("stride") and name != "stride_table")
        )
        if aligned and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source_class = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_class(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": most}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = resource_usage(compiled.asm["cubin"])
    return {
        "warps": compiled.metadata.num_warps, "registers": usage["REG"], "stack": usage["STACK"],
        "shared": compiled.metadata.shared, "limit": LIMIT_KIB[capability] * 1024,
    }  # fmt: skip


def resource_usage(cubin: bytes) -> dict[str, int]:
    """What the assembler says of a compiled kernel: REG and STACK of one thread, among others."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    function = usage[usage.index(" Function ") :]  # before it stands what the file has in common
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", function)}


def with_offset(constants: dict) -> dict:
    """The kernel that takes something off the keys that it stores."""
    return {name: value for name, value in constants.items() if name != "offset_ptr"}


def kernels(capability: int, head_dim: int, block_size: int):
    """Every kernel of M4 with the constants and options it is launched with for this shape."""
    d, b, major_minor = head_dim, block_size, divmod(capability, 10)
    if d == 64:
        return  # it asks for less than 128
    strides = {"STRIDE_BLOCK": HKV * b * d, "STRIDE_TOKEN": d, "STRIDE_HEAD": b * d, "B": b}
    prefill, decode = prefill_config(d, 2, major_minor), DecodeConfig()
    windows = [WINDOW] * (capability in (80, 90))  # there the tests look at registers
    for listed, window in ((True, WINDOW), *[(False, 0)] * (d == 128)) if windows else ((True, 0),):
        yield (prefill_kernel, {**strides, "G": HQ // HKV, "D": d, "TILE_M": prefill.tile_m, "TILE_N": prefill.tile_n,
                                "LISTED": listed, "WINDOW": window}, prefill.num_warps, prefill.num_stages)  # fmt: skip
    group = HQ // HKV
    shape = {"HKV": HKV, "G": group, "GROUP": group, "D": d, "TILE": decode.tile, "M": 16, "STEP": decode.merge_step,
             "PDL": capability >= 90, "NORM": True, "WINDOW": 0, "offset_ptr": None}  # fmt: skip
    for raw, num_warps, window in (
        (True, 2, 0),
        *[(False, 4, 0)] * (d == 128),
        *((True, 2, window) for window in windows),
    ):
        yield decode_kernel, {**strides, **shape, "RAW": raw, "WINDOW": window}, num_warps, decode.num_stages
    heads = {"HQ": HQ, "HKV": HKV, "D": d, "QS": HQ, "KVS": HKV, "NORM": True, "H": 1024, "WIDTH": 1024, "SCALE": True,
             "PDL": capability >= 90, "offset_ptr": None}  # fmt: skip
    yield qk_norm_rope_store_kernel, {**strides, **heads}, 4, 3
    if capability >= 89 and (d, b) == (128, 16):
        fp8, tiles = {**strides, "cache": "fp8e4nv"}, {"TILE_M": prefill.tile_m, "TILE_N": prefill.tile_n}
        yield (prefill_kernel, {**fp8, **tiles, "G": HQ // HKV, "D": d, "LISTED": True, "WINDOW": WINDOW},
               prefill.num_warps, prefill.num_stages)  # fmt: skip
        for raw, window in ((False, 0), (True, WINDOW)):
            constants = {**fp8, **shape, "TILE": 64, "RAW": raw, "WINDOW": window}
            yield decode_kernel, with_offset(constants) if raw else constants, 4, decode.num_stages
        yield qk_norm_rope_store_kernel, with_offset({**fp8, **heads}), 4, 3
    if (d, b) == (128, 16):  # those below depend on neither
        chunks = {"MIN_CHUNK": decode.min_chunk, "MAX_CHUNK": decode.max_chunk, "QUEUE_CHUNK": decode.queue_chunk,
                  "MAX_PARTS": MAX_PARTS}  # fmt: skip
        yield store_kvcache_kernel, {**strides, "HKV": HKV, "D": d, "WIDTH": HKV * d}, 4, 3
        plan = {"HKV": HKV, "TILE": decode.tile, "SEQS": 256, **chunks}
        for window in (0, *windows):
            yield plan_kernel, {**plan, "WINDOW": window}, 4, 3
        yield add_rms_norm_kernel, {"H": 1024, "WIDTH": 1024, "HAS_RESIDUAL": True}, 4, 3
        gate = {"I": 3072, "WIDTH": 1024, "H": 1024, "STREAM_WIDTH": 1024}
        yield act_and_mul_kernel, {**gate, "SCALE": True, "GELU": False}, 4, 3
        yield act_and_mul_kernel, {**gate, "SCALE": False, "GELU": True}, 4, 3


def kernels_of_m6(capability: int, head_dim: int, block_size: int):
    """Those of the sixth milestone: attention in all shapes that it serves, the others in one."""
    if capability == 90 and head_dim in (64, 128):
        shape = {"HKV": HKV, "B": block_size, "G": HQ // HKV, "D": head_dim, "STAGES": NUM_STAGES}
        yield prefill_hopper_kernel, shape, 4, 3
        strides = {
            "STRIDE_BLOCK": HKV * block_size * head_dim,
            "STRIDE_TOKEN": head_dim,
            "STRIDE_HEAD": block_size * head_dim,
        }
        for group in (1, 8) if head_dim == 128 else ():
            yield (prefetching_decode.prefetching_decode_kernel,
                   {**strides, "B": block_size, "HKV": HKV, "G": group, "GROUP": group, "D": head_dim, "M": 16, "NORM": True,
                    "TILE": prefetching_decode.TILE, "STEP": DecodeConfig().merge_step, "PDL": True},
                   prefetching_decode.NUM_WARPS, prefetching_decode.NUM_STAGES)  # fmt: skip
    if (head_dim, block_size) != (128, 16):
        return
    yield gumbel_max_kernel, {"WIDTH": TILE, "FAST": True}, 8, 3
    yield best_of_tiles_kernel, {"WIDTH": 64, "KEEP": True}, 1, 3
    shift = 16 if capability >= 80 else 13
    sizes = {"GROUPS": 8192, "CAPACITY": CAPACITY, "CHUNK": CHUNK, "WIDE_CHUNK": WIDE_CHUNK}
    yield scan_kernel, {"WIDTH": TILE}, 8, 3
    yield finish_kernel, {**sizes, "SHIFT": shift, "FAST": True}, WARPS, 3
    yield plain_kernel, {"WIDTH": TILE, "FAST": True}, 8, 3
    yield special_kernel, {"WIDTH": TILE, "FAST": True}, 8, 3
    yield record_sampled_kernel, {"ALL": False}, 4, 3
    lines = {"TOKEN": 0, "ROW": 1, "SEQ_LEN": 2, "NEW_BLOCK": 7}
    yield unpack_decode_kernel, {**lines, "B": block_size, "WIDTH": 128}, 1, 3
    yield unpack_ragged_kernel, {"B": block_size, "WIDTH": 128}, 1, 3
    yield list_tiles_kernel, {"TILE_M": 128, "WIDTH": 32}, 1, 3
    yield from small_linears(capability)
    yield from summed_linears(capability)


# Hidden size, query and KV heads, MLP: Qwen3-0.6B, 4B and 8B, Llama-1B, and one of eight ranks of a 70B.
GEOMETRIES = [(1024, 16, 8, 3072), (2560, 32, 8, 9728), (4096, 32, 8, 12288), (2048, 32, 8, 8192), (8192, 8, 1, 3584)]


def small_linears(capability: int):
    """The four products of each geometry's layers, for as many tokens as they are served; one geometry on older cards.

    For one token, too, where the tests look at registers.
    """
    for hidden, heads, kv_heads, mlp in GEOMETRIES[: 5 if capability == 90 else 1]:
        for rows, width, norm, gated in (((heads + 2 * kv_heads) * 128, hidden, True, False),
                                         (hidden, heads * 128, False, False), (mlp, hidden, True, True),
                                         (hidden, mlp, False, False)):  # fmt: skip
            weight = torch.empty(rows * (1 + gated), width, device="meta")
            alone = [1] * (hidden == 1024 and capability in (80, 90))
            for tokens in (*alone, most_tokens(weight)):
                num_warps, per_program, chunk = tiling(tokens, rows, 2 * width * (1 + gated))
                yield skinny_linear_kernel, {"K": width, "NORM": norm, "GATED": gated, "RESIDUAL": not norm, "M": tokens,
                                            "ROWS": per_program, "CHUNK": chunk, "PDL": capability >= 90}, num_warps, 3  # fmt: skip


def most_tokens(weight: torch.Tensor) -> int:
    """The product of few tokens serves this many."""
    return max(tokens for tokens in (1, 2, 4) if serves(tokens, weight))


def summed_linears(capability: int):
    """What two ranks add up of each geometry's layers; one geometry on older cards."""
    for hidden, heads, _, mlp in GEOMETRIES[: 4 if capability == 90 else 1]:
        for width in (heads * 64, mlp // 2):
            weight = torch.empty(hidden, width, dtype=torch.bfloat16, device="meta")
            for tokens in [most_tokens(weight)] * fits(most_tokens(weight), weight):
                num_warps, per_program, chunk = tiling(tokens, hidden, 2 * width)
                yield summed_linear_kernel, {"K": width, "RANK": 1, "VALUES": VALUES, "RESIDUAL": True, "M": tokens, "WAITS": True,
                                             "ROWS": per_program, "CHUNK": chunk, "PDL": capability >= 90}, num_warps, 3  # fmt: skip


def kernels_of_x2(capability: int, head_dim: int, block_size: int):
    """Products with weights of 8 bits: those that ask for most in Qwen3-4B, and a few on cards that are checked less."""
    if (head_dim, block_size) != (128, 16):
        return
    fp8, pdl = "fp8" if capability >= 89 else "fp8_bits", {"PDL": capability >= 90}
    few = [(1, 9728, False, fp8)]  # tokens, width, gated, kind
    some = [(16, fp8)]  # tokens and kind
    if capability in (80, 90):
        few += [
            (1, 2560, True, fp8),
            (4, 2560, True, fp8),
            (4, 2560, True, "int8"),
            (1, 2560, True, "int8"),
            (4, 9728, False, fp8),
        ]
        some += [(32, "int8"), (64, fp8), (256, fp8), (256, "int8")]
    for tokens, width, gated, kind in few if capability >= 80 else ():
        yield quant_gemv_of(tokens, 9728 if gated else 2560, width, gated, kind, pdl)
    for tokens, kind in some:
        group = {"GROUP_ROWS": 1, "GROUP": 9728} if kind == "int8" else {"GROUP_ROWS": 128, "GROUP": 128}
        shape = tiles(tokens, 9728, group["GROUP"], kind, 2, capability)
        split = {"SPLIT": shape.pop("programs") > 0}
        num_warps, num_stages = shape.pop("num_warps"), shape.pop("num_stages")
        yield (
            quant_matmul_kernel,
            {"OUTPUTS": 2560, "K": 9728, **group, **split, "KIND": kind, "RESIDUAL": True, **shape, **IN_8_BITS},
            num_warps,
            num_stages,
        )
    if capability == 86:  # little shared memory, and floats of 32 bits, which one may ask for
        for tokens in (16, 64):
            shape = tiles(tokens, 9728, 9728, "int8", 4, capability)
            num_warps, num_stages = shape.pop("num_warps"), shape.pop("num_stages")
            group = {
                "GROUP_ROWS": 1,
                "GROUP": 9728,
                "KIND": "int8",
                "dtype": "fp32",
                "SPLIT": shape.pop("programs") > 0,
            }
            yield (
                quant_matmul_kernel,
                {"OUTPUTS": 2560, "K": 9728, **group, "RESIDUAL": True, **shape, **IN_8_BITS},
                num_warps,
                num_stages,
            )
    yield unpack_kernel, {"K": 2560, "GROUP_ROWS": 128, "GROUP": 128, "KIND": fp8, "BLOCK": 2048, **IN_8_BITS}, 4, 3
    if capability >= 89:
        for group in (9728, 128):
            yield quantize_rows_kernel, {"K": 9728, "GROUP": group, "WIDTH": 16384}, 8, 3
    yield from kernels_of_int4(capability)


def quant_gemv_of(tokens, outputs, width, gated, kind, options):
    """The product of few tokens with codes in Qwen3-4B's layers: with a norm and gate, or with a residual."""
    rows, columns = (1, width) if kind == "int8" else (1, 128) if kind == "int4" else (128, 128)
    ahead = {"NORM": gated, "GATED": gated, "RESIDUAL": not gated} | ({} if gated else {"columns_ptr": None})
    group = {"GROUP_ROWS": rows, "GROUP": columns, "KIND": kind, "zero_ptr": None}
    if takes(torch.empty(tokens, width, dtype=torch.bfloat16, device="meta"), (rows, columns), kind):
        tile = tile_of_integers(outputs * (1 + gated), width, kind, num_sms=132)
        return integer_gemv_kernel, {"K": width, **group, **ahead, **tile, **options}, tile["SPLITS"], 3
    row_bytes, group_bytes = width // 2 if kind == "int4" else width, 64 if kind.startswith("int") else columns
    tile = tile_of_gemv(tokens, outputs * (1 + gated), row_bytes, group_bytes, kind == "fp8" and tokens == 1)
    return quant_gemv_kernel, {"K": width, **group, **ahead, "M": tokens, **tile, **options}, tile["SPLITS"], 3


def kernels_of_int4(capability: int):
    """Products with weights of 4 bits, in Qwen3-4B's largest layers."""
    few = [(1, 2560, 9728, False, 128)]  # tokens, rows, width, gated, group
    some = [(16, 128)]  # tokens, group
    if capability in (80, 90):
        few += [(1, 9728, 2560, True, 128), (2, 9728, 2560, True, 128), (4, 9728, 2560, True, 32)]
        some += [(64, 32), (256, 128)]
    for tokens, rows, width, gated, group in few:
        num_warps, per_program, quads = tiling_4(tokens, rows, width, gated)
        none = {} if group == 32 else {"zero_ptr": None}
        none |= {} if gated else {"columns_ptr": None}
        yield int4_linear_kernel, {"K": width, "GROUP": group, "NORM": gated, "GATED": gated, "RESIDUAL": not gated, "M": tokens,
                                   "ROWS": per_program, "QUADS": quads, "PDL": capability >= 90, **none}, num_warps, 3  # fmt: skip
    few += [(1, 2560, 4096, False, 128)]
    for tokens, outputs, width, gated, _ in few if capability >= 80 else ():
        options = {"PDL": capability >= 90, "scales": "fp16"}
        kernel, constants, *launch = quant_gemv_of(tokens, outputs, width, gated, "int4", options)
        yield kernel, constants, *launch
        if width == 4096:  # with zeros, too
            yield kernel, {name: value for name, value in constants.items() if name != "zero_ptr"}, *launch
    in_words = {"KIND": "int4", "codes": "i32", "scales": "fp16"}
    some = [(*one, 2) for one in some] + [(256, 128, 4), (128, 512, 2)] * (capability == 86)
    for tokens, group, itemsize in some:
        shape = tiles(tokens, 2560, group, "int4", itemsize, capability)
        split = {"SPLIT": shape.pop("programs") > 0}
        num_warps, num_stages = shape.pop("num_warps"), shape.pop("num_stages")
        none = {} if group == 32 else {"zero_ptr": None}
        none |= {"dtype": "fp32"} if itemsize == 4 else {}
        yield (
            quant_matmul_kernel,
            {
                "OUTPUTS": 9728,
                "K": 2560,
                "GROUP_ROWS": 1,
                "GROUP": group,
                "RESIDUAL": True,
                **split,
                **shape,
                **none,
                **in_words,
            },
            num_warps,
            num_stages,
        )
    yield unpack_kernel, {"K": 2560, "GROUP_ROWS": 1, "GROUP": 128, "BLOCK": 512, **in_words}, 4, 3
    for tokens, zeros in ((256, False), (256, True), (128, False), (128, True)) if capability == 90 else ():
        none = {} if zeros else {"zero_ptr": None}
        yield (int4_hopper_kernel, {"OUTPUTS": 19456, "K": 2560, "RESIDUAL": zeros, "TWO": tokens == 256, "tokens": tokens,
                                    "STAGES": STAGES_OF_TOKENS[tokens], "scales": "fp16", **none}, 4, 3)  # fmt: skip


def kernels_of_x3(capability: int, head_dim: int, block_size: int):
    """Attention of checked rows, with few and with the most in a tile; not on cards older than Ampere, where it is not used."""
    if capability < 80:
        return
    if (head_dim, block_size) == (128, 16):
        config = verify_config(32, head_dim, 2, False)
        chunks = {"MIN_CHUNK": config.min_chunk, "MAX_CHUNK": config.max_chunk, "QUEUE_CHUNK": config.queue_chunk}
        yield list_verify_tiles_kernel, {"TILE_TOKENS": 8, "WIDTH": 128}, 1, 3
        yield mask_logits_kernel, {"WIDTH": MASKED}, 4, 3
        yield plan_verify_kernel, {"HKV": HKV, "TILE": 32, "TILES": 256, "MAX_PARTS": 32, **chunks}, 4, 3
    strides = {
        "STRIDE_BLOCK": HKV * block_size * head_dim,
        "STRIDE_TOKEN": head_dim,
        "STRIDE_HEAD": block_size * head_dim,
    }
    few, most = (5, 2, False), (16, 8, False)  # tokens, query heads that share a KV head, FP8
    shapes = {(80, 128): [few, most], (86, 256): [most], (89, 128): [(5, 2, True)],
              (90, 128): [few, most, (16, 4, True)]}.get((capability, head_dim), [])  # fmt: skip
    for tokens, group, is_fp8 in shapes:
        _, rows = tile_shape(tokens, group, 2 * head_dim)
        config, cache = verify_config(rows, head_dim, 2, is_fp8), {"cache": "fp8e4nv"} if is_fp8 else {}
        yield (verify_kernel, {**strides, **cache, "B": block_size, "HKV": HKV, "G": group, "D": head_dim, "TILE": config.tile,
                              "M": rows, "PDL": capability >= 90}, num_warps_of(rows, 2 * head_dim), config.num_stages)  # fmt: skip
        yield (merge_verify_kernel, {"HKV": HKV, "G": group, "D": head_dim, "M": rows, "ROWS": MERGED[0], "STEP": config.merge_step,
                                     "TILES": 256, "PDL": capability >= 90}, MERGED[1], 3)  # fmt: skip


def kernels_of_x4(capability: int, head_dim: int, block_size: int):
    """Those of a mixture of experts, in the shapes of Qwen3-30B-A3B: for few, some, and many pairs of each expert."""
    if (head_dim, block_size) != (128, 16):
        return
    hidden, inner, experts, asked = 2048, 768, 128, 8
    pdl = {"PDL": capability >= 90}
    for k, gated in ((hidden, True), (inner, False)):
        shape = {"K": k, "E": experts, "ASKED": asked if gated else 1}
        warps, rows, chunk = tiling_of_pairs(2 * k * (1 + gated))
        yield moe_gemv_kernel, {**shape, "ALL": experts, "GATED": gated, "ROWS": rows, "CHUNK": chunk, **pdl}, warps, 3
        shape["WIDTH"] = experts
        for each in (0, 16, 32, 256) if capability in (80, 90) else (0, 256):
            tile_m, tile_n, tile_k, num_warps, num_stages = tiles_for(each, torch.bfloat16, gated, capability)
            tiles = {"TILE_M": tile_m, "TILE_N": tile_n, "TILE_K": tile_k, "PRECISION": "tf32"}
            yield grouped_linear_kernel, {**shape, "GATED": gated, **tiles}, num_warps, num_stages
        if capability == 90:
            h, parts = grouped_hopper, 1 + gated
            tiles = {"PARTS": parts, "TILE_M": h.TILE_M, "REST": h.REST, "TILE_N": h.ROWS // parts, "TILE_K": h.TILE_K}
            yield h.grouped_hopper_kernel, {**shape, **tiles}, h.WARPS, h.STAGES
    yield from grouped_codes(capability)
    choice = {"WIDTH": experts, "TOP_K": asked, "CHOICES": asked, "TOKENS": 16}
    mixtral = {"WIDTH": 8, "TOP_K": 2, "CHOICES": 2, "TOKENS": 64}  # few experts: the most tokens in one program
    for alone in (True, False):
        yield choose_kernel, {**choice, "E": experts, "NORMALISE": True, "ALONE": alone, "PDL": False}, 8, 3
    yield choose_kernel, {**choice, "E": experts, "TOKENS": 1, "NORMALISE": True, "ALONE": True, **pdl}, 1, 3
    yield choose_kernel, {**mixtral, "E": 8, "NORMALISE": True, "ALONE": True, "PDL": False}, 8, 3
    for shape in (choice, mixtral):
        yield order_kernel, {**shape, "STEP": STEP, "PDL": False}, 4, 3
    combined = {"H": hidden, "TOP_K": asked, "WIDTH": 1024}
    yield combine_kernel, combined, 4, 3
    yield late_combine_kernel, combined | pdl, 4, 3
    yield deferred_add_rms_norm_kernel, {"H": hidden, "WIDTH": hidden, "HAS_RESIDUAL": True, **pdl}, 8, 3


def grouped_codes(capability: int):
    """Experts in codes, those that ask for most: FP8 in blocks, and INT4 with zeros in short groups or without, in the tiles for few and
    many pairs; on other cards one. INT8 asks for less.
    """
    hidden, inner, experts, asked = 2048, 768, 128, 8
    fp8 = "fp8" if capability >= 89 else "fp8_bits"
    shapes = [(fp8, 8, True, 128)]  # kind, pairs, gated, inputs that share a scale
    if capability in (80, 90):
        shapes += [(fp8, 2048, False, 128), (fp8, 32768, True, 128), ("int4", 8, True, 32), ("int4", 32768, True, 32)]
        shapes += [("int4", 32768, True, 128)]
    for kind, pairs, gated, group in shapes:
        k, rows = hidden if gated else inner, 128 if kind == fp8 else 1
        shape = tiles_of_experts(pairs // experts, k, group, kind, torch.bfloat16, gated, capability)
        num_warps, num_stages = shape.pop("num_warps"), shape.pop("num_stages")
        shape |= {"K": k, "E": experts, "WIDTH": experts, "ASKED": asked if gated else 1, "GATED": gated}
        shape |= {"GROUP_ROWS": rows, "GROUP": group, "KIND": kind}
        shape |= IN_8_BITS if kind == fp8 else {"codes": "i32", "scales": "fp16"}
        shape |= {"zero_ptr": None} if kind == "int4" and group == 128 else {}
        yield grouped_quant_kernel, shape, num_warps, num_stages


made_for_ampere: dict[str, dict[str, int]] = {}


def variants(capability: int, milestone: str) -> list[dict]:
    """Compile in the dtype that is usual on the card: bf16 where it has that."""
    kernels_of = {"m4": kernels, "m6": kernels_of_m6, "x2": kernels_of_x2, "x3": kernels_of_x3, "x4": kernels_of_x4}[
        milestone
    ]
    dtype = "bf16" if capability >= 80 else "fp16"
    rows = []
    for head_dim, block_size in SHAPES[capability]:
        for kernel, constants, num_warps, num_stages in kernels_of(capability, head_dim, block_size):
            variant = f"{kernel.__name__} {constants} {num_warps} {num_stages}"
            if capability in AS_AMPERE and variant in made_for_ampere:
                usage = made_for_ampere[variant] | {"limit": LIMIT_KIB[capability] * 1024}
            else:
                usage = compile_kernel(kernel, capability, dtype, constants, num_warps, num_stages)
            if capability == 80:
                made_for_ampere[variant] = usage
            rows.append({"kernel": kernel.__name__, "shape": f"D={head_dim} B={block_size} {constants}", **usage})
    return rows


if __name__ == "__main__":
    print(json.dumps({capability: variants(capability, sys.argv[1]) for capability in SHAPES}))
