"""M4's kernels on inputs of odd shapes, and what they give: `python -m tests.m4.kernel_results FILE` saves it, computed without Triton."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.modules["triton"] = None  # as if it were not installed: numpy stands in

from folovllm.kernels.activation import gelu_and_mul, silu_and_mul
from folovllm.kernels.decode import DecodeConfig, SplitKVDecode
from folovllm.kernels.prefill import PrefillConfig, prefill
from folovllm.kernels.prefill_tiles import list_tiles
from folovllm.kernels.qk_norm_rope import Preparation, qk_norm_rope_store
from folovllm.kernels.rms_norm import add_rms_norm, rms_norm
from folovllm.kernels.store import store_kvcache
from tests.m4.cases import Paged, starts

HALF, FP8 = torch.float16, torch.float8_e4m3fn
LENS, NEW = [1, 15, 16, 17, 33, 65, 130], [1, 15, 3, 17, 10, 65, 1]


def store(dtype: torch.dtype, slot_dtype: torch.dtype) -> list[torch.Tensor]:
    qkv = torch.randn(5, 9, 8).to(dtype)
    kv_cache = torch.zeros(2, 6, 3, 5, 8, dtype=dtype).permute(0, 1, 3, 2, 4)
    store_kvcache(qkv[:, 3:6], qkv[:, 6:], kv_cache, torch.tensor([29, 0, -1, 7, 14], dtype=slot_dtype))
    return [kv_cache]


def prompts(
    dtype: torch.dtype = torch.float32, block_size: int = 16, heads: tuple[int, int] = (2, 1), window: int | None = None,
    listed: bool = False, cache: torch.dtype | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    paged, query = Paged.make(LENS, block_size, heads[1], 32, dtype), torch.randn(sum(NEW), heads[0], 32).to(dtype)
    tiles = list_tiles(starts(NEW), paged.seq_lens, sum(NEW), 0, 16) if listed else None
    out = prefill(
        query, paged.kv_cache.to(cache or dtype), starts(NEW), paged.seq_lens, paged.block_tables, max(NEW), 32**-0.5,
        config=PrefillConfig(16, 16, 4, 2), window=window, tiles=tiles,
    )  # fmt: skip
    return [out, *([] if tiles is None else [tiles])]


def decodes(
    dtype: torch.dtype = torch.float32, block_size: int = 16, heads: tuple[int, int] = (2, 1), window: int | None = None,
    programs: int = 3, raw: bool = False, cache: torch.dtype | None = None,
) -> list[torch.Tensor]:  # fmt: skip
    (num_heads, num_kv_heads), lens = heads, [*LENS, 0]
    paged, kv_cache = Paged.make(lens, block_size, num_kv_heads, 32, dtype), None
    kv_cache = paged.kv_cache.to(cache or dtype)
    query = torch.randn(len(lens), num_heads + (2 * num_kv_heads if raw else 0), 32).to(dtype)
    if raw:
        query = query.flatten(1)
        paged.block_tables[-1] = 0  # where the token of the padding is stored
    config = DecodeConfig(tile=32 if cache else 16, min_chunk=32, max_chunk=32, queue_chunk=32, merge_step=2)
    kernel = SplitKVDecode(9, *heads, 32, block_size, torch.device("cpu"), config, programs, window)
    out = torch.empty(len(lens), num_heads, 32, dtype=dtype)
    weights = 1 + torch.randn(2, 32).to(dtype) / 4
    preparation = Preparation(torch.randn(160, 32), *weights, 1e-6) if raw else None
    kernel.plan(paged.seq_lens, len(lens))
    kernel(query, kv_cache, paged.block_tables, len(lens), 32**-0.5, out, preparation)
    return [out, kernel.header, kernel.queue, kernel.done, *([kv_cache.nan_to_num()] if raw else [])]


def norms(dtype: torch.dtype, hidden: int) -> list[torch.Tensor]:
    x, residual = torch.randn(4, 1100)[:, :hidden].to(dtype), torch.randn(4, hidden).to(dtype)
    weight = torch.randn(hidden).to(dtype)
    return [rms_norm(x, weight, 1e-6), *add_rms_norm(x, residual, weight, 1e-6)]


def activations(dtype: torch.dtype, width: int) -> list[torch.Tensor]:
    gate_up, stream = 4 * torch.randn(3, 2 * width).to(dtype), torch.randn(3, 40).to(dtype)
    return [silu_and_mul(gate_up), silu_and_mul(gate_up, stream, 1e-6), gelu_and_mul(gate_up)]


def preparations(dtype: torch.dtype, heads: tuple[int, int], normed: bool, late: bool) -> list[torch.Tensor]:
    (num_heads, num_kv_heads), parts = heads, [heads[0], heads[1], heads[1]]
    qkv, stream = torch.randn(4, num_heads + 2 * num_kv_heads, 16).to(dtype), torch.randn(4, 40).to(dtype)
    kv_cache = torch.zeros(2, 3, num_kv_heads, 4, 16, dtype=dtype).transpose(2, 3)
    weights = list(torch.randn(2, 16).to(dtype)) if normed else []
    positions, slots = torch.tensor([0, 7, 63, 20]), torch.tensor([5, 0, -1, 11])
    preparation, extra = Preparation(torch.randn(64, 16), *weights, eps=1e-6), (stream, 1e-5) if late else ()
    return [qk_norm_rope_store(*qkv.split(parts, 1), positions, kv_cache, slots, preparation, *extra), kv_cache]


CASES: dict[str, Callable[[], list[torch.Tensor]]] = {
    **{f"store {d} {s}": partial(store, d, s) for d, s in ((torch.float32, torch.int32), (HALF, torch.int64))},
    **{f"prefill, blocks of {size}": partial(prompts, block_size=size) for size in (4, 24)},
    "prefill, heads (6, 2)": partial(prompts, heads=(6, 2)),
    "prefill, float16": partial(prompts, HALF), "prefill, FP8": partial(prompts, cache=FP8),
    "prefill, window": partial(prompts, window=9), "prefill, listed": partial(prompts, listed=True),
    **{f"decode, blocks of {size}": partial(decodes, block_size=size) for size in (8, 24)},
    "decode, heads (14, 2)": partial(decodes, heads=(14, 2)), "decode, 1 program": partial(decodes, programs=1),
    "decode, float16": partial(decodes, HALF), "decode, FP8": partial(decodes, cache=FP8), "decode, window": partial(decodes, window=9),
    "decode, raw": partial(decodes, raw=True), "decode, raw, float16": partial(decodes, HALF, raw=True, heads=(4, 2)),
    **{f"norms {d} {n}": partial(norms, d, n) for d, n in ((torch.float32, 72), (HALF, 1000))},
    **{f"activations {d} {n}": partial(activations, d, n) for d, n in ((torch.float32, 72), (HALF, 1100))},
    **{f"preparations {d} {h} {n} {late}": partial(preparations, d, h, n, late) for d, h, n, late in (
        (torch.float32, (4, 2), True, False), (HALF, (3, 1), True, False), (HALF, (4, 2), False, True))},
}  # fmt: skip


def result(name: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return CASES[name]()


if __name__ == "__main__":
    torch.save({name: result(name) for name in CASES}, Path(sys.argv[1]))
