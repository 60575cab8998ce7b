"""`folovllm bench memory`: blocks against slots in the same bytes.

M2 gets a number of slots, M3 the same memory in blocks, and each the same requests, all there at the start: many short
ones and a few long ones. How many run at once, how fast, and how much of what they hold is empty?
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from folovllm.apps.bench.contenders import Contender
from folovllm.apps.bench.report import Result
from folovllm.apps.bench.serve import Observed, run_workload, running, warm_up
from folovllm.apps.bench.throughput import bench_throughput
from folovllm.apps.bench.workload import Workload, mixed_workload
from folovllm.config import PRESETS, EngineConfig


def bench_memory(contenders: list[Contender], slots: int = 8, max_model_len: int = 512, count: int = 96) -> Result:
    """Measure one preset after the other, over the same requests and in the same bytes.

    Raises:
        ValueError: a preset whose cache is no pool, or a size of the pool beside `slots`.
    """
    for name, fields in contenders:
        if PRESETS[fields["milestone"]]["kv_cache"] == "growing":
            raise ValueError(f"{name} has no pool of KV cache to compare: take m2 or later")
        if fields.get("num_kv_blocks"):
            raise ValueError("bench memory sizes the pool itself: give --slots in place of num_kv_blocks")
    prompts, answers = (max_model_len // 64 or 1, max_model_len // 4), (max_model_len // 32 or 1, max_model_len // 2)
    name = f"mixed, in the memory of {slots} sequences of {max_model_len} tokens"
    workload = replace(mixed_workload(count, 0, prompts, answers), name=name)
    sized = [(name, in_memory_of(slots, **{**fields, "max_model_len": max_model_len})) for name, fields in contenders]
    return bench_throughput(sized, workload, benchmark="memory", look_every=1)


def in_memory_of(slots: int, milestone: str, max_model_len: int, block_size: int = 16, **others: Any) -> dict[str, Any]:
    """Return the fields of an engine whose cache has the bytes of `slots` sequences of `max_model_len` tokens."""
    pool = {"num_kv_blocks": slots * max_model_len // block_size, "block_size": block_size}
    pool = {"num_kv_blocks": slots} if PRESETS[milestone]["kv_cache"] == "slots" else pool
    fields = {"milestone": milestone, "max_model_len": max_model_len, "max_num_seqs": 256, "use_tqdm": False}
    return fields | pool | others


def measure(milestone: str, workload: Workload, slots: int, max_model_len: int, **fields: Any) -> Observed:
    """Serve the requests in the memory of `slots` sequences of `max_model_len` tokens; loading does not count."""
    with running(EngineConfig(**in_memory_of(slots, milestone, max_model_len, **fields))) as engine:
        warm_up(engine, workload)
        return run_workload(engine, workload.for_vocabulary(engine.setup.vocab_size), look_every=1)
