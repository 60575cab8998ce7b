"""`folovllm bench reuse`: what a cached prefix saves, and how long a long prompt holds others up."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from folovllm.apps.bench.contenders import Contender, used_settings
from folovllm.apps.bench.report import Metric, Result, Run
from folovllm.apps.bench.serve import exactly, finish, run_workload, running
from folovllm.apps.bench.workload import BenchRequest, Workload
from folovllm.cache.block_manager import BlockManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.scheduler import Scheduler
from folovllm.engine.setup import choose_device

Clock = Callable[[], float]  # the wall's, or that of the process alone, which a busy machine does not disturb

TAIL = 32  # tokens of a prompt that nobody shares
SHORT = 8  # tokens of the running request's prompt
DECODED_BEFORE = 8  # tokens of the running request before the long prompt comes


def engine_for(contender: Contender, longest: int, **overrides: Any) -> AbstractContextManager[LLMEngine]:
    """Run an engine whose context is long enough."""
    return running(EngineConfig(**{"max_model_len": longest} | contender[1] | overrides))


def milliseconds(seconds: Iterable[float]) -> Metric:
    """The metric of repeats."""
    return Metric.of([1e3 * each for each in seconds], "ms", False)


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
        "TTFT of the first": milliseconds(first for first, _ in pairs),
        "TTFT of the second": milliseconds(second for _, second in pairs),
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
    seen: dict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    with engine_for(contender, prefix + TAIL + output_len, enable_prefix_caching=True) as engine:
        loads = {
            f"{word} shared": workload(engine, prefix, count, output_len, word == "prefix")
            for word in ("prefix", "nothing")
        }
        serve(engine, loads["nothing shared"], True, clock)  # warm-up
        for (name, load), caching in itertools.product(loads.items(), (False, True) * repeats):
            seen[name, caching].append(serve(engine, load, caching, clock))
        config = used_settings(engine.setup.config)
    runs = []
    for title, caching in (("the cache off", False), ("the cache on", True)):
        rates = {
            word: [load.output_tokens / seconds for seconds, _ in seen[word, caching]] for word, load in loads.items()
        }
        metrics = {word: Metric.of(rate, "tok/s") for word, rate in rates.items()}
        runs.append(Run(title, config | {"enable_prefix_caching": caching}, metrics))
    found = [100 * hit_rate for _, hit_rate in seen["prefix shared", True]]
    runs[1].metrics["tokens found, prefix shared"] = Metric.of(found, "%")
    return Result("reuse", loads["prefix shared"].describe(), runs)


def workload(engine: LLMEngine, prefix: int, count: int, output_len: int, shared: bool) -> Workload:
    """Prompts of equal lengths, with the same beginning or each with its own."""
    rng = random.Random(0)
    head = random_ids(rng, prefix, engine)
    heads = [head if shared else random_ids(rng, prefix, engine) for _ in range(count)]
    requests = [BenchRequest(head + random_ids(rng, TAIL, engine), output_len) for head in heads]
    return Workload(f"{prefix:,} tokens of {prefix + TAIL:,} shared", requests)


def serve(engine: LLMEngine, load: Workload, caching: bool, clock: Clock) -> tuple[float, float]:
    """Serve the first request alone, then the others together; the cache is empty at the start.

    Returns the seconds, and the share of the tokens that were found.
    """
    assert isinstance(engine.scheduler, Scheduler), "prefix caching needs a pool of blocks"
    old = engine.scheduler.kv
    manager = PrefixCachingBlockManager if caching else BlockManager
    engine.scheduler.kv = manager(old.num_blocks, old.block_size)
    parts = [Workload(load.name, part) for part in (load.requests[:1], load.requests[1:]) if part]
    start = clock()
    for part in parts:
        run_workload(engine, part)
    return clock() - start, engine.prefix_cache_stats().hit_rate if caching else 0.0


def bench_gaps(
    contender: Contender, prompt: int, chunks: tuple[int, ...], repeats: int = 3, clock: Clock = time.perf_counter
) -> Result:
    """A request is running when a prompt of `prompt` tokens arrives: how long does it wait for its next token?

    Once with the prompt in one step, then with steps of each of `chunks` tokens.
    """
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": prompt + 512}
    settings = {"whole": whole} | {
        f"{n:,}": {"enable_chunked_prefill": True, "max_num_batched_tokens": n} for n in chunks if n < prompt
    }
    runs = []
    for name, overrides in settings.items():
        with engine_for(contender, prompt + 16, enable_prefix_caching=False, **overrides) as engine:
            watch_gaps(engine, prompt, seed=0)
            seen = [watch_gaps(engine, prompt, seed, clock) for seed in range(1, repeats + 1)]
            metrics = {
                "longest gap": milliseconds(max(gaps) for gaps, _ in seen),
                "tokens meanwhile": Metric.of([float(len(gaps)) for gaps, _ in seen]),
                "TTFT of the long prompt": milliseconds(ttft for _, ttft in seen),
            }
            runs.append(Run(name, used_settings(engine.setup.config), metrics))
    work = [BenchRequest([0] * SHORT, 1), BenchRequest([0] * prompt, 1)]
    return Result("reuse", Workload(f"{prompt:,} tokens arrive, by tokens a step", work).describe(), runs)


def watch_gaps(
    engine: LLMEngine, prompt: int, seed: int, clock: Clock = time.perf_counter
) -> tuple[list[float], float]:
    """Return the gaps between the running request's tokens while the long prompt is computed, and its TTFT: seconds."""
    rng = random.Random(seed)
    short, long = random_ids(rng, SHORT, engine), random_ids(rng, prompt, engine)  # drawn here: it takes milliseconds
    engine.add_request("runs", short, exactly(prompt))
    decoded = 0
    while decoded < DECODED_BEFORE:
        decoded += sum(len(output.outputs[0].delta_token_ids) for output in engine.step())
    times, arrival, through = [clock()], clock(), False
    engine.add_request("long", long, exactly(1))
    while not through:
        ids = {output.request_id for output in engine.step() if output.outputs[0].delta_token_ids}
        through = "long" in ids
        if "runs" in ids:
            times.append(clock())
    ttft = clock() - arrival
    engine.abort_request("runs")
    finish(engine)
    return [b - a for a, b in itertools.pairwise(times)], ttft


def bench_reuse(
    contender: Contender, parts: list[str] | None, prefix: int | None, prompt: int, requests: int | None,
    chunks: tuple[int, ...], repeats: int, cpu_time: bool,
) -> Iterator[tuple[str, Result]]:  # fmt: skip
    """Yield the parts that were asked for, each as soon as it is done. Sizes that are left open depend on the device.

    Raises:
        ValueError: no such part.
    """
    gpu = choose_device(contender[1].get("device")).type == "cuda"
    clock = time.process_time if cpu_time else time.perf_counter
    prefix = prefix or (16_000 if gpu else 2_000)
    benches = {
        "ttft": lambda: bench_ttft(contender, prefix, repeats, clock),
        "sharing": lambda: bench_sharing(contender, prefix // 4, requests or (256 if gpu else 16), 32, repeats, clock),
        "gaps": lambda: bench_gaps(contender, prompt, chunks, repeats, clock),
    }
    if unknown := set(parts or ()) - set(benches):
        raise ValueError(f"unknown part {min(unknown)!r}: choose of {', '.join(benches)}")
    for part in parts or benches:
        yield part, benches[part]()
