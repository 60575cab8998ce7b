"""`folovllm bench reuse`: what a cached prefix saves, and how long a long prompt holds others up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

from folovllm.apps.bench.contenders import Contender, used_settings
from folovllm.apps.bench.report import Metric, Result, Run, milliseconds
from folovllm.apps.bench.serve import exactly, finish, run_workload, running
from folovllm.apps.bench.workload import BenchRequest, Workload
from folovllm.cache.block_manager import BlockManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.scheduler import Scheduler

Clock = Callable[[], float]  # the wall's, or that of the process alone, which a busy machine does not disturb

TAIL = 32  # tokens of a prompt that nobody shares
SHORT = 8  # tokens of the running request's prompt, and those it has generated before the long prompt comes


def engine_for(contender: Contender, longest: int, **overrides: object) -> AbstractContextManager[LLMEngine]:
    """Run an engine whose context is long enough."""
    return running(EngineConfig(**{"max_model_len": longest, **contender[1], **overrides}))


def random_ids(rng: random.Random, count: int, engine: LLMEngine) -> list[int]:
    """Draw token ids; in all likelihood nobody has asked for the same before."""
    return rng.choices(range(engine.setup.vocab_size), k=count)


def bench_ttft(contender: Contender, prefix: int, repeats: int = 5, clock: Clock = time.perf_counter) -> Result:
    """Serve two prompts that share `prefix` tokens, one after the other. Each repeat has tokens of its own."""
    rng, pairs = random.Random(0), []
    with engine_for(contender, prefix + TAIL + 8, enable_prefix_caching=True) as engine:
        for _ in range(repeats + 1):
            shared = random_ids(rng, prefix, engine)
            prompts = [shared + random_ids(rng, TAIL, engine) for _ in range(2)]
            pairs.append([time_to_first_token(engine, prompt, clock) for prompt in prompts])
        settings = used_settings(engine.setup.config)
    del pairs[0]  # it warms up
    metrics = {
        "TTFT of the first": milliseconds([first for first, _ in pairs]),
        "TTFT of the second": milliseconds([second for _, second in pairs]),
        "first / second": Metric.of([first / second for first, second in pairs]),
    }
    work = Workload(f"two prompts that share {prefix:,} tokens", [BenchRequest(prompt, 1) for prompt in prompts])
    return Result("reuse", work.describe(), [Run("the cache on", settings, metrics)])


def time_to_first_token(engine: LLMEngine, prompt: list[int], clock: Clock = time.perf_counter) -> float:
    """Return the seconds until the first token of a request that has the engine to itself."""
    start = clock()
    engine.add_request("only", prompt, exactly(1))
    finish(engine)
    return clock() - start


def bench_sharing(
    contender: Contender, prefix: int, count: int, output_len: int = 32, repeats: int = 3, clock: Clock = time.perf_counter
) -> Result:  # fmt: skip
    """Serve `count` requests that begin alike, and as many of the same lengths that do not, with the cache off and on.

    One engine serves all of it, and off and on take turns: what else the machine does falls on both.
    """
    with engine_for(contender, prefix + TAIL + output_len, enable_prefix_caching=True) as engine:
        rng, config = random.Random(0), used_settings(engine.setup.config)
        off, on = (
            Run(f"the cache {is_on}", config | {"enable_prefix_caching": is_on == "on"}, {}) for is_on in ("off", "on")
        )
        found = {}
        for name, num_heads in (("prefix shared", 1), ("nothing shared", count)):
            heads = [random_ids(rng, prefix, engine) for _ in range(num_heads)] * (count // num_heads)
            requests = [BenchRequest(head + random_ids(rng, TAIL, engine), output_len) for head in heads]
            load = Workload(f"{prefix:,} tokens of {prefix + TAIL:,} shared", requests)
            serve(engine, load, True, clock)  # warm-up
            pairs = [[serve(engine, load, caching, clock) for caching in (False, True)] for _ in range(repeats)]
            for run, seen in zip((off, on), zip(*pairs, strict=True), strict=True):
                run.metrics[name] = Metric.of([load.output_tokens / seconds for seconds, _ in seen], "tok/s")
            found[name] = Metric.of([100 * hit_rate for _, (_, hit_rate) in pairs], "%")
        on.metrics["tokens found, prefix shared"] = found["prefix shared"]
    return Result("reuse", load.describe(), [off, on])


def serve(engine: LLMEngine, load: Workload, caching: bool, clock: Clock) -> tuple[float, float]:
    """Serve the first request alone, then the others together; the cache is empty at the start.

    Returns the seconds, and the share of the tokens that were found.
    """
    assert isinstance(engine.scheduler, Scheduler), "prefix caching needs a pool of blocks"
    old = engine.scheduler.kv
    manager = PrefixCachingBlockManager if caching else BlockManager
    engine.scheduler.kv = manager(old.num_blocks, old.block_size)
    start = clock()
    for part in filter(None, (load.requests[:1], load.requests[1:])):
        run_workload(engine, Workload(load.name, part))
    return clock() - start, engine.prefix_cache_stats().hit_rate if caching else 0.0


def bench_gaps(
    contender: Contender, prompt: int, chunks: tuple[int, ...], repeats: int = 3, clock: Clock = time.perf_counter
) -> Result:
    """A request is running when a prompt of `prompt` tokens arrives: how long does it wait for its next token?

    Once with the prompt in one step, then with steps of each of `chunks` tokens.
    """
    runs = []
    for size in (None, *(size for size in chunks if size < prompt)):
        settings = {"enable_chunked_prefill": size is not None, "max_num_batched_tokens": size or prompt + 512}
        with engine_for(contender, prompt + 16, enable_prefix_caching=False, **settings) as engine:
            watch_gaps(engine, prompt, seed=0)
            seen = [watch_gaps(engine, prompt, seed, clock) for seed in range(1, repeats + 1)]
            metrics = {
                "longest gap": milliseconds([max(gaps) for gaps, _ in seen]),
                "tokens meanwhile": Metric.of([float(len(gaps)) for gaps, _ in seen]),
                "TTFT of the long prompt": milliseconds([ttft for _, ttft in seen]),
            }
            runs.append(Run(f"{size:,}" if size else "whole", used_settings(engine.setup.config), metrics))
    work = [BenchRequest([0] * SHORT, 1), BenchRequest([0] * prompt, 1)]
    return Result("reuse", Workload(f"{prompt:,} tokens arrive, by tokens a step", work).describe(), runs)


def watch_gaps(
    engine: LLMEngine, prompt: int, seed: int, clock: Clock = time.perf_counter
) -> tuple[list[float], float]:
    """Return the gaps between the running request's tokens while the long prompt is computed, and its TTFT: seconds."""
    rng = random.Random(seed)
    short, long = random_ids(rng, SHORT, engine), random_ids(rng, prompt, engine)  # drawn here: it takes milliseconds
    engine.add_request("runs", short, exactly(prompt))
    decoded, answered = 0, set[str]()
    while decoded < SHORT:
        decoded += sum(len(output.outputs[0].delta_token_ids) for output in engine.step())
    times, arrival = [clock()], clock()
    engine.add_request("long", long, exactly(1))
    while "long" not in answered:
        answered = {output.request_id for output in engine.step() if output.outputs[0].delta_token_ids}
        times += [clock()] * ("runs" in answered)
    ttft = clock() - arrival
    engine.abort_request("runs")
    finish(engine)
    return [after - before for before, after in pairwise(times)], ttft
