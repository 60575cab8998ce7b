"""What it costs to look at an engine: `python tools/measure_recording.py --random-weights qwen3-0.6b`.

One engine serves the same workload again and again, by turns with nobody listening (off), with a recording that is written
to a file (record), and with the lines of the live view handed on as a server's engine does it (live). Prints output tokens a
second of each pass, and what looking costs: the median over the rounds of seconds with it over seconds without, less 1.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from folovllm.bench.contenders import random_model
from folovllm.bench.serve import empty_prefix_cache, exactly, running, warm_up
from folovllm.bench.workload import Workload, load_workload
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.setup import set_up
from folovllm.inspector.paced import LiveLines
from folovllm.inspector.recorder import recording
from folovllm.server.messages import Seen, encode


def run_pass(engine: LLMEngine, workload: Workload, kind: str, folder: Path) -> float:
    """Seconds to serve the workload."""
    empty_prefix_cache(engine)
    lines = LiveLines(engine) if kind == "live" else None
    with (
        recording(engine, folder / "run.jsonl") if kind == "record" else nullcontext(),
        (folder / "live").open("wb") as live,
    ):
        if lines is not None:
            lines.begin()
        start = time.perf_counter()
        for index, request in enumerate(workload.requests):
            params = exactly(request.output_len, workload.temperature, seed=index)
            engine.add_request(str(index), request.prompt, params, stream=False)
        while engine.has_unfinished_requests():
            if lines is not None and (pieces := lines.take(all_of_it=False)):
                live.write(encode(Seen(pieces)))
            engine.step()
        seconds = time.perf_counter() - start
        if lines is not None:
            lines.end("closed")
    assert not engine.events.on, "the passes must not look at each other"
    return seconds


def seconds_of_passes(config: EngineConfig, workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Seconds of each pass, by kind; every second round is the other way round, so that a drift hits all alike."""
    seconds: dict[str, list[float]] = {"off": [], "record": [], "live": []}
    with tempfile.TemporaryDirectory() as folder, running(config) as engine:
        warm_up(engine, workload)
        run_pass(engine, workload, "off", Path(folder))  # what is made on first use
        for number in range(rounds):
            for kind in [*seconds][:: -1 if number % 2 else 1]:
                seconds[kind].append(run_pass(engine, workload, kind, Path(folder)))
        print(f"a recording has {Path(folder, 'run.jsonl').stat().st_size / 1e6:.1f} MB")
    return seconds


def report(seconds: dict[str, list[float]], workload: Workload) -> None:
    """A line for each kind."""
    off = seconds["off"]
    for kind, times in seconds.items():
        rates = "  ".join(f"{workload.output_tokens / t:9,.0f}" for t in times)
        cost = statistics.median(100 * (a / b - 1) for a, b in zip(times, off, strict=True))
        best = 100 * (min(times) / min(off) - 1)
        costs = "" if kind == "off" else f"   costs {cost:+.2f}% (best pass over best: {best:+.2f}%)"
        print(f"{kind:<7} {rates} tok/s{costs}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", metavar="NAME", help="a geometry: qwen3-0.6b, -4b or -8b")
    parser.add_argument("--workload", default="nano-vllm")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--rounds", type=int, default=5)
    wanted = parser.parse_args()
    common: dict[str, Any] = {"milestone": "m6", "max_num_batched_tokens": 16_384, "use_tqdm": False}
    with tempfile.TemporaryDirectory() as folder:
        if wanted.random_weights:
            common = random_model(wanted.random_weights, Path(folder), common)
        config = EngineConfig(**common)
        workload = load_workload(wanted.workload, set_up(config).vocab_size, wanted.requests)
        print(f"{len(workload.requests)} requests, {workload.output_tokens} output tokens, {os.cpu_count()} CPU cores")
        report(seconds_of_passes(config, workload, wanted.rounds), workload)


if __name__ == "__main__":
    main()
