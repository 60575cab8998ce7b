"""Compile a milestone's kernels for each compute capability with no GPU: the launches of the functions that users of a kernel call.

Prints a JSON object: for each capability a list of objects, one a variant: its kernel, shape, warps, registers of a thread, bytes of stack, where what
does not fit into registers goes, bytes of shared memory, and those that the card has for one block.

Tensors of the CPU say that they are on a GPU; a launch compiles and does nothing else. A program of its own,
because Triton decides when it is first imported whether kernels are compiled or interpreted:
    python -m tests.m4.offline_compile m4
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from folovllm.distributed.one_shot_buffers import OneShotBuffers
from folovllm.electives.hopper.grouped import grouped_hopper
from folovllm.electives.hopper.prefill import prefill_hopper
from folovllm.electives.hybrid.kernels.delta_rule import DeltaHeads, delta_rule
from folovllm.electives.hybrid.kernels.gated_norm import gated_norm
from folovllm.electives.hybrid.kernels.short_conv import short_conv
from folovllm.electives.kv_transfer.kernels.pieces import move_pieces
from folovllm.electives.moe.kernels.grouped_linear import grouped_linear
from folovllm.electives.moe.kernels.moe_gemv import moe_gemv
from folovllm.electives.moe.kernels.route import choose, combine
from folovllm.electives.quantization import weight as quantized
from folovllm.electives.quantization.kernels.fp8_linear import fp8_linear
from folovllm.electives.quantization.kernels.grouped_quant import grouped_quant
from folovllm.electives.quantization.kernels.int4_linear import int4_linear
from folovllm.electives.quantization.kernels.quant_gemv import quant_gemv
from folovllm.electives.quantization.kernels.quant_matmul import quant_matmul, unpacked
from folovllm.electives.quantization.kernels.quantize_rows import quantize_rows
from folovllm.electives.quantization.weight import QuantizedWeight
from folovllm.electives.rollouts.kernels.attention import attention_tile, invariant_attention
from folovllm.electives.rollouts.kernels.linear import invariant_linear
from folovllm.electives.spec_decode.heads import KeptStates
from folovllm.electives.spec_decode.kernels.pairs import pair_up, start_chain
from folovllm.electives.spec_decode.kernels.verify_attention import SplitKVVerify
from folovllm.kernels import pdl, variants
from folovllm.kernels.activation import gelu_and_mul, silu_and_mul
from folovllm.kernels.decode import DecodeConfig, SplitKVDecode
from folovllm.kernels.filter_logits import FilterWorkspace
from folovllm.kernels.gumbel_max import gumbel_max
from folovllm.kernels.penalties import StepRows
from folovllm.kernels.prefetching_decode import prefetching_decode
from folovllm.kernels.prefill import prefill
from folovllm.kernels.prefill_tiles import list_tiles
from folovllm.kernels.qk_norm_rope import Preparation, qk_norm_rope_store
from folovllm.kernels.record_sampled import record_sampled
from folovllm.kernels.rms_norm import add_rms_norm
from folovllm.kernels.sample_tokens import sample_tokens
from folovllm.kernels.skinny_linear import is_supported, skinny_linear
from folovllm.kernels.store import store_kvcache
from folovllm.kernels.summed_linear import can_handle, summed_linear
from folovllm.kernels.unpack_step import unpack_decode, unpack_ragged
from folovllm.sample.sampling_row import line_width, mask_width
from folovllm.step.kv_format import FP8, UNSCALED, KVScales

# (D, B) to compile for: those that ask for the most where the limit is low, and few where compiling is slow.
SHAPES = {75: [(128, 16)], 80: [(128, 16)], 86: [(128, 16), (256, 256)], 89: [(128, 16)],
          90: [(64, 256), (128, 16), (256, 256)]}  # fmt: skip
# Triton makes of a kernel what it makes for sm_80: only what is launched otherwise is compiled anew.
AS_AMPERE = (86, 89)
LOOKED_AT = (80, 90)  # the tests look at registers
# Most shared memory one block may ask for, in KiB (CUDA C++ Programming Guide, table of compute capabilities).
LIMIT_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227}
CUDA = torch.device("cuda")
WINDOW = 1024  # of a layer that has one
VOCAB = 151_936

card = SimpleNamespace(capability=0, dtype=torch.bfloat16)
rows: list[dict[str, Any]] = []  # what the card's kernels take
made_for_ampere: dict[str, dict[str, int]] = {}
launch = JITFunction.run


# --- a card that is not there ---------------------------------------------------------------------------------------


class OnTheCpu(TorchFunctionMode):
    """New tensors are the CPU's, wherever they are asked for: memory that nobody touches takes no place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def pretend_card(capability: int) -> None:
    """From now on all is compiled for this one, in the dtype that is usual there: bf16 where it has that."""
    card.capability, card.dtype = capability, torch.bfloat16 if capability >= 80 else torch.float16
    for known in (
        pdl.available, variants.num_sms, variants.capability_of, variants.kernel_variant,
        quantized.has_fp8,
    ):  # fmt: skip
        known.cache_clear()
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32), get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
        )
    )  # fmt: skip


def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of a launch."""
    *_, binder = kernel.device_caches[card.capability]
    _, specialization, options = binder(*args, **kwargs)
    variant = f"{kernel.__name__} {specialization} {options}"
    if any(row["variant"] == variant for row in rows):
        return
    usage = made_for_ampere.get(variant) if card.capability in AS_AMPERE else None
    if usage is None:
        compiled = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        found = resource_usage(compiled.asm["cubin"])
        usage = {"warps": compiled.metadata.num_warps, "registers": found["REG"], "stack": found["STACK"],
                 "shared": compiled.metadata.shared}  # fmt: skip
    if card.capability == 80:
        made_for_ampere[variant] = usage
    limit = LIMIT_KIB[card.capability] * 1024
    rows.append({"kernel": kernel.__name__, "shape": str(kwargs), "variant": variant, **usage, "limit": limit})


def resource_usage(cubin: bytes) -> dict[str, int]:
    """What the assembler says of a compiled kernel: REG and STACK of one thread, among others."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    function = usage[usage.index(" Function ") :]  # before it stands what the file has in common
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", function)}


def new(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype or card.dtype, device="cpu")


def int32(*shape: int) -> torch.Tensor:
    return new(*shape, dtype=torch.int32)


def float32(*shape: int) -> torch.Tensor:
    return new(*shape, dtype=torch.float32)


# --- what is launched -----------------------------------------------------------------------------------------------


class Heads:
    """The tensors of attention over some sequences in blocks, with 16 query heads unless told otherwise, and 8 KV heads."""

    def __init__(self, tokens: int, head_dim: int, block_size: int, num_heads: int = 16, is_fp8: bool = False) -> None:
        self.sizes = num_heads, 8, head_dim, block_size
        self.qkv = new(tokens, (num_heads + 16) * head_dim)
        self.query, self.key, self.value = self.qkv.view(tokens, -1, head_dim).split([num_heads, 8, 8], dim=1)
        self.cache = new(2, 64, 8, block_size, head_dim, dtype=FP8 if is_fp8 else None).transpose(2, 3)
        self.starts, self.lens, self.table = int32(tokens + 1), int32(tokens), int32(tokens, 128)
        self.slots = self.positions = new(tokens, dtype=torch.int64)
        self.scales = KVScales(0.5, 0.5, float32(8, head_dim)) if is_fp8 else UNSCALED
        weights = new(head_dim), new(head_dim)
        self.preparation = Preparation(float32(4096, head_dim), *weights, 1e-6, self.scales)
        self.ragged = self.query, self.cache, self.starts, self.lens, self.table, 99, 0.1

    def store(self, stream: torch.Tensor) -> None:
        new_tokens = self.query, self.key, self.value, self.positions
        qk_norm_rope_store(*new_tokens, self.cache, self.slots, self.preparation, stream, 1e-6)

    def prefill(self, window: int | None, listed: bool = True) -> None:
        tiles = int32(99, 2) if listed else None
        prefill(*self.ragged, tiles=tiles, scales=self.scales, window=window)

    def decode(self, raw: bool, window: int | None = None) -> None:
        count, config = len(self.query), DecodeConfig(tile=64) if self.cache.dtype == FP8 else None
        kernel = SplitKVDecode(256, *self.sizes, CUDA, config, window=window)
        kernel.plan(self.lens, count)
        query, preparation = (self.qkv, self.preparation) if raw else (self.query, None)
        kernel(query, self.cache, self.table, count, 0.1, torch.empty_like(self.query), preparation, self.scales)


def launch_m4(d: int, b: int) -> None:
    """Attention in all shapes, the others in one."""
    if d == 64:
        return  # it asks for less than 128
    windows = [WINDOW] * (card.capability in LOOKED_AT)
    few, some = Heads(4, d, b), Heads(64, d, b)
    for window in windows or [None]:
        few.prefill(window)
    for window in (None, *windows):
        few.decode(raw=True, window=window)
    stream = new(4, 1024)
    few.store(stream)
    if d != 128:
        return
    some.decode(raw=False)
    if windows:
        few.prefill(None, listed=False)
    if card.capability >= 89:
        few, some = (Heads(count, d, b, is_fp8=True) for count in (4, 64))
        few.prefill(WINDOW)
        few.decode(raw=True, window=WINDOW)
        some.decode(raw=False)
        few.store(stream)
    store_kvcache(some.key, some.value, some.cache, some.slots)
    for tokens in (4, 64):
        add_rms_norm(new(tokens, 1024), new(tokens, 1024), new(1024), 1e-6)
    silu_and_mul(new(4, 6144), stream, 1e-6)
    gelu_and_mul(new(4, 6144))


# Hidden size, query and KV heads, MLP: Qwen3-0.6B, 4B and 8B, Llama-1B, and one of eight ranks of a 70B.
GEOMETRIES = [(1024, 16, 8, 3072), (2560, 32, 8, 9728), (4096, 32, 8, 12288), (2048, 32, 8, 8192), (8192, 8, 1, 3584)]


def launch_m6(d: int, b: int) -> None:
    """Attention in all shapes that it serves, the others in one."""
    if card.capability == 90 and d in (64, 128):
        heads = Heads(4, d, b)
        prefill_hopper(*heads.ragged)
        for num_heads in (8, 64) if d == 128 else ():
            heads = Heads(4, d, b, num_heads)
            kernel, out = SplitKVDecode(4, *heads.sizes, CUDA), torch.empty_like(heads.query)
            prefetching_decode(kernel, heads.qkv, heads.cache, heads.table, 4, 0.1, out, heads.preparation)
    if (d, b) != (128, 16):
        return
    logits, line, last = new(64, VOCAB), int32(64), new(256, dtype=torch.int64)
    gumbel_max(logits, float32(64), line, line, line, keep=(last, line))
    work, fields, lines = FilterWorkspace.allocate(64, VOCAB, CUDA), int32(256, 16), int32(256, line_width(VOCAB))
    step = StepRows(fields, lines, int32(256, mask_width(VOCAB)), line, line)
    sample_tokens(logits, step, work, keep=(last, line))
    record_sampled(last[:64], line, line, line, fields, lines)
    unpack_decode(int32(10, 64), int32(256, 128), last, b, (0, 1, 2, 7))
    unpack_ragged(line, line, line, int32(999), int32(256, 128), last, b)
    list_tiles(int32(65), line, 999, 0, 128)
    launch_few_tokens()


def launch_few_tokens() -> None:
    """The products of each geometry's layers, for as many tokens as they are served; one geometry on older cards."""
    buffers = OneShotBuffers.of(1, (new(64, dtype=torch.int64), new(64, dtype=torch.int64)))
    for hidden, heads, kv_heads, mlp in GEOMETRIES[: 5 if card.capability == 90 else 1]:
        for count, width, norm, gated in (((heads + 2 * kv_heads) * 128, hidden, 1e-6, False), (hidden, heads * 128, None, False),
                                          (mlp, hidden, 1e-6, True), (hidden, mlp, None, False)):  # fmt: skip
            weight = new(count * (1 + gated), width)
            for tokens in {max(n for n in (1, 2, 4) if is_supported(n, weight)), *[1] * (hidden == 1024)}:
                skinny_linear(new(tokens, width), weight, norm, gated, None if norm else new(tokens, count))
        for width in (heads * 64, mlp // 2) if hidden < 8192 else ():  # of two ranks
            weight = new(hidden, width)
            tokens = max(n for n in (1, 2, 4) if is_supported(n, weight))
            if can_handle(tokens, weight):
                summed_linear(new(tokens, width), weight, buffers, new(tokens, hidden))


def launch_x2(d: int, b: int) -> None:
    """Products with weights of 8 and 4 bits: those that ask for most in Qwen3-4B, and a few on cards that are checked less."""
    if (d, b) != (128, 16):
        return
    few, some = [(1, 9728, False, "fp8")], [(16, "fp8")]  # tokens, width, gated, kind
    few4, some4 = [(1, 2560, 9728, False, 128)], [(16, 128)]  # tokens, outputs, width, gated, group
    if card.capability in LOOKED_AT:
        few += [(1, 2560, True, "fp8"), (4, 2560, True, "fp8"), (4, 2560, True, "int8"), (1, 2560, True, "int8")]
        few += [(4, 9728, False, "fp8")]
        some += [(32, "int8"), (64, "fp8"), (256, "fp8"), (256, "int8")]
        few4 += [(1, 9728, 2560, True, 128), (2, 9728, 2560, True, 128), (4, 9728, 2560, True, 32)]
        some4 += [(64, 32), (256, 128)]
    for tokens, width, gated, kind in few if card.capability >= 80 else ():
        launch_gemv(tokens, 9728 if gated else 2560, width, gated, in_8_bits(9728 * 2 if gated else 2560, width, kind))
    for tokens, kind in some:
        quant_matmul(new(tokens, 9728), in_8_bits(2560, 9728, kind), new(tokens, 2560))
    if card.capability == 86:  # little shared memory, and floats of 32 bits, which one may ask for
        for tokens in (16, 64):
            quant_matmul(float32(tokens, 9728), in_8_bits(2560, 9728, "int8"), float32(tokens, 2560))
        quant_matmul(float32(256, 2560), in_4_bits(9728, 2560, 128), float32(256, 9728))
        quant_matmul(new(128, 2560), in_4_bits(9728, 2560, 512), new(128, 9728))
    unpacked(in_8_bits(2560, 2560, "fp8"), card.dtype)
    unpacked(in_4_bits(2560, 2560, 128, card.dtype), card.dtype)
    unpacked(in_4_bits(2560, 2560, 32, card.dtype), card.dtype)
    for group in (None, 128) if card.capability >= 89 else ():
        weight = in_8_bits(2560, 4096, "fp8")
        weight = weight if group else QuantizedWeight(weight.weight, float32(2560, 1), 1, 4096)
        for tokens in (8, 64, 128):
            fp8_linear(
                *quantize_rows(new(tokens, 8192), group, gated=True), weight, new(tokens, 2560), new(tokens, 2560)
            )
        quant_gemv(new(1, 4096), weight, 1e-6, False, None, new(4096), rounds=True)
    for tokens, outputs, width, gated, group in few4:
        weight = in_4_bits(outputs * (1 + gated), width, group, card.dtype if group == 32 else None)
        norm, residual, columns = ahead(tokens, outputs, width, gated)
        int4_linear(new(tokens, width), weight.weight, weight.scale, weight.zeros, norm, gated, residual, columns)
    for tokens, outputs, width, gated, _ in few4 if card.capability >= 80 else ():
        launch_gemv(tokens, outputs, width, gated, in_4_bits(outputs * (1 + gated), width, 128))
    for zeros in (None, torch.uint8) if card.capability >= 80 else ():
        launch_gemv(1, 2560, 4096, False, in_4_bits(2560, 4096, 128, zeros))
    for tokens, group in some4:
        zeros = card.dtype if group == 32 else None
        quant_matmul(new(tokens, 2560), in_4_bits(9728, 2560, group, zeros), new(tokens, 9728))


def in_8_bits(outputs: int, inputs: int, kind: str) -> QuantizedWeight:
    """FP8 in blocks of 128 by 128, or int8 with a scale for each output."""
    if kind == "int8":
        return QuantizedWeight(new(outputs, inputs, dtype=torch.int8), float32(outputs, 1), 1, inputs)
    return QuantizedWeight(new(outputs, inputs, dtype=FP8), float32(outputs // 128, inputs // 128), 128, 128)


def in_4_bits(outputs: int, inputs: int, group: int, zeros: torch.dtype | None = None) -> QuantizedWeight:
    places = None if zeros is None else new(outputs, inputs // group, dtype=zeros)
    scale = new(outputs, inputs // group, dtype=torch.float16)
    return QuantizedWeight(int32(outputs, inputs // 8), scale, 1, group, places)


def ahead(tokens: int, outputs: int, width: int, gated: bool) -> tuple[Any, ...]:
    """Norm, residual and columns of a product in a layer."""
    return (1e-6, None, new(width)) if gated else (None, new(tokens, outputs), None)


def launch_gemv(tokens: int, outputs: int, width: int, gated: bool, weight: QuantizedWeight) -> None:
    norm, residual, columns = ahead(tokens, outputs, width, gated)
    quant_gemv(new(tokens, width), weight, norm, gated, residual, columns)


def launch_x3(d: int, b: int) -> None:
    """Attention of verified rows, with few and with the most in a tile; not on cards older than Ampere, where it is not used."""
    few, most = (5, 16, False), (16, 64, False)  # tokens, query heads, FP8
    shapes = {(80, 128): [few, most], (86, 128): [few], (86, 256): [most], (89, 128): [(5, 16, True)],
              (90, 128): [few, most, (16, 32, True)]}.get((card.capability, d), [])  # fmt: skip
    for tokens, num_heads, is_fp8 in shapes:
        heads = Heads(tokens, d, b, num_heads, is_fp8)
        kernel, out = SplitKVVerify(256, tokens, *heads.sizes, CUDA, is_fp8=is_fp8), torch.empty_like(heads.query)
        kernel.plan(heads.starts, heads.lens, 128)
        kernel(heads.query, heads.cache, heads.starts, heads.lens, heads.table, tokens, 0.1, out, scales=heads.scales)
    if (card.capability, d) == (90, 128):
        launch_pairs()


def launch_pairs() -> None:
    """What a draft head gets of a step, and what a chain begins with."""
    kept = KeptStates(8, 5, 4096, torch.bfloat16, torch.device("cpu"))
    batch = SimpleNamespace(positions=new(64, dtype=torch.int64), slot_mapping=new(64, dtype=torch.int64), query_start_loc=int32(9),
                            seq_lens=int32(8), rows=int32(8), block_tables=int32(8, 64), num_seqs=8)  # fmt: skip
    pair_up(new(64, 4096), batch, kept, 16)
    batch.positions = new(8, dtype=torch.int64)
    start_chain(batch, 3, kept, 16, 99, 1)


def launch_x4(d: int, b: int) -> None:
    """Those of a mixture of experts, in the shapes of Qwen3-30B-A3B: for few, some, and many pairs of each expert."""
    if (d, b) != (128, 16):
        return
    hidden, inner, experts, asked = 2048, 768, 128, 8
    starts = new(experts + 1, dtype=torch.int64)

    def pairs_of(pairs: int, gated: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that go in, and their order."""
        x = new(pairs // asked, hidden) if gated else new(pairs, inner)
        return x, new(pairs, dtype=torch.int64)

    for gated in (True, False):
        weight = new(experts, 2 * inner, hidden) if gated else new(experts, hidden, inner)
        width = inner if gated else hidden
        x, order = pairs_of(asked, gated)
        moe_gemv(x, weight, order, starts, gated, new(asked, width))
        for pairs in (64, 2048, 2560, 4096, 32768) if card.capability in LOOKED_AT else (64, 32768):
            x, order = pairs_of(pairs, gated)
            grouped_linear(x, weight, order, starts, gated)
        if card.capability == 90:
            x, order = pairs_of(32768, gated)
            grouped_hopper(x, weight, order, starts, gated, new(32768, width))
    shapes = [("fp8", 8, True, 128)]  # kind, pairs, gated, inputs that share a scale
    if card.capability in LOOKED_AT:
        shapes += [("fp8", 2048, False, 128), ("fp8", 32768, True, 128)]
        shapes += [("int4", 8, True, 32), ("int4", 32768, True, 32), ("int4", 32768, True, 128)]
    for kind, pairs, gated, group in shapes:
        outputs, k = experts * (2 * inner if gated else hidden), hidden if gated else inner
        zeros = card.dtype if group == 32 else None
        weight = in_8_bits(outputs, k, kind) if kind == "fp8" else in_4_bits(outputs, k, group, zeros)
        x, order = pairs_of(pairs, gated)
        grouped_quant(x, weight, experts, order, starts, gated)
    for tokens, count, top_k in (*((n, experts, asked) for n in (1, 16, 4096)), (64, 8, 2), (4096, 8, 2)):
        choose(new(tokens, count), top_k, True, range(count))
    for tokens in (1, 64):
        combine(new(tokens, asked, hidden), new(tokens, asked))


def launch_x5(d: int, b: int) -> None:
    """Those of a hybrid model, in the shapes of Qwen3-Next's linear layers: decodes alone, and beside prompts."""
    if (d, b) != (128, 16):
        return
    heads = DeltaHeads(16, 32, 128, 128)
    channels, slots = 2 * 16 * 128 + 32 * 128, 8
    starts, lens, rows = int32(5), int32(4), int32(4)
    for num_decodes in (4, 0):
        shape = starts, lens, rows, num_decodes, 64
        mixed = short_conv(new(64, channels), new(slots, 3, channels), new(channels, 1, 4), *shape)
        gates = new(64, 32), new(64, 32), new(32, dtype=torch.float32), new(32, dtype=torch.float32)
        out = delta_rule(mixed, gates, new(slots, 32, 128, 128, dtype=torch.float32), heads, *shape)
        gated_norm(out, torch.empty_like(out), new(128), 1e-6)
    ring, seen = new(slots, 3 + 8, channels + 64), int32(slots, 32, 4)  # of an engine with drafts
    weight, matrices = new(channels, 1, 4), new(slots, 32, 128, 128, dtype=torch.float32)
    mixed = short_conv(new(64, channels), ring, weight, *shape, 4)
    delta_rule(mixed, gates, matrices, heads, *shape, (ring, weight, seen), 5)
    many = new(256, 32, 128)
    gated_norm(many, many, new(128), 1e-6)


def launch_x6(d: int, b: int) -> None:
    """Products with narrow and with wide weights, and attention in all shapes, at the most heads that share a KV head, too."""
    for num_heads in (16, 32):
        heads = Heads(4, d, b, num_heads)
        tile = attention_tile(CUDA, d, card.dtype.itemsize)
        invariant_attention(heads.query, heads.cache, heads.starts, heads.lens, heads.table, int32(9, 2), 0.1, tile)
    for outputs in (1024, 2560, 6144) if (d, b) == (128, 16) else ():
        invariant_linear(new(64, 1024), new(outputs, 1024), new(outputs))
    if card.capability == 90:
        invariant_linear(float32(64, 1024), float32(6144, 1024))


def launch_x7(d: int, b: int) -> None:
    """Both ways between a cache and a buffer."""
    for to_cache in (False, True):
        move_pieces(int32(4, 9, 2 * d * b), int32(3, 4, 2 * d * b), int32(3), to_cache=to_cache)


LAUNCH = {"m4": launch_m4, "m6": launch_m6, "x2": launch_x2, "x3": launch_x3, "x4": launch_x4, "x5": launch_x5,
          "x6": launch_x6, "x7": launch_x7}  # fmt: skip

if __name__ == "__main__":
    JITFunction.run = compile_instead
    torch.Tensor.is_cuda, torch.Tensor.device = property(lambda _: True), property(lambda _: CUDA)
    torch.cuda.get_device_capability = lambda *_: divmod(card.capability, 10)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=132)
    found = {}
    with OnTheCpu():
        for capability, shapes in SHAPES.items():
            rows.clear()
            pretend_card(capability)
            for shape in shapes:
                LAUNCH[sys.argv[1]](*shape)
            found[capability] = [{name: row[name] for name in row.keys() - {"variant"}} for row in rows]
    print(json.dumps(found))
