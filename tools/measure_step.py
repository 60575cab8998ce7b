"""Time steps on a GPU: `python tools/measure_step.py sampling`, `formats` or `prompts`, of a geometry with random weights.

sampling  milliseconds a decode step by how its tokens are sampled, in rounds that take turns
formats   milliseconds a decode step of 1 and of 256 sequences, and of 16,384 prompt tokens, by the format of the weights or the
          cache; in parentheses the ratio to the first engine
prompts   prompts that come one after the other while others decode: milliseconds from the arrival of each to its first token
          ("host": of them in the code that starts a step), and between two tokens of the others meanwhile ("stall")

All times are medians.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from folovllm.bench.contenders import GEOMETRIES, parse_contenders, random_model
from folovllm.bench.serve import finish, running
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams

PROMPT, SETTLE, STEPS = 128, 20, 100
FORMATS = "m6,m6:quantization=fp8,m6:quantization=int8,m6:quantization=int4"
BUDGET, LONG_PROMPT, TIMES = 16_384, 2048, 5
FILTERED: dict[str, Any] = {"top_k": 50, "top_p": 0.9}
PENALISED: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.5}
FORMED: dict[str, Any] = {"structured_outputs": {"regex": "[a-z ]{3000}"}}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # how one of the sequences is sampled, and all others
    "plain": ({}, {}),
    "top_k 50, top_p 0.9": (FILTERED, FILTERED),
    "one with a penalty": (PENALISED, {}),
    "penalties, top_k 50, top_p 0.9": (PENALISED | FILTERED, PENALISED | FILTERED),
    "one with logprobs": ({"logprobs": 5}, {}),
    "one with a regex": (FORMED, {}),  # these two need llguidance
    "all with a regex": (FORMED, FORMED),
}


def timed_steps(engine: LLMEngine, count: int) -> list[float]:
    """Run `count` steps; return the milliseconds of each."""
    times, last = [], time.perf_counter()
    for _ in range(count):
        engine.step()
        last, before = time.perf_counter(), last
        times.append(1000 * (last - before))
    return times


def step_time(engine: LLMEngine, num_seqs: int, kind: str = "plain") -> float:
    """Return the milliseconds of a decode step."""
    first, rest = KINDS[kind]
    for i in range(num_seqs):
        params = SamplingParams(
            temperature=0.7, seed=i, ignore_eos=True, max_tokens=SETTLE + STEPS + 8, **(rest if i else first)
        )
        engine.add_request(f"r{i}", [(37 * i + j) % 5000 for j in range(PROMPT)], params, stream=False)
    timed_steps(engine, SETTLE)
    times = timed_steps(engine, STEPS)
    finish(engine)
    engine.reset_prefix_cache()
    return statistics.median(times)


def prompts_time(engine: LLMEngine) -> float:
    """Return the milliseconds of prompts that fill a step, from their arrival to their tokens."""
    times = []
    for number in range(TIMES + 1):  # the first one warms up
        rng = random.Random(number)
        prompts = [[rng.randrange(5000) for _ in range(LONG_PROMPT)] for _ in range(BUDGET // LONG_PROMPT)]
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"p{number}.{i}", prompt, SamplingParams(max_tokens=1, ignore_eos=True), stream=False)
        finish(engine)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def host_times(runner: Any) -> list[float]:
    """Return a list to which the runner adds, from now on, the milliseconds it takes to start each step with a prompt."""
    times, start = list[float](), runner.execute_model

    def timed(step: Any) -> Any:
        began = time.perf_counter()
        pending = start(step)
        if not step.is_decode:
            times.append(1000 * (time.perf_counter() - began))
        return pending

    runner.execute_model = timed
    return times


def first_tokens(engine: LLMEngine, host: list[float], num_decodes: int, length: int, rounds: int) -> dict[str, float]:
    """Return milliseconds by name: prompts of `length` tokens, one after the other, beside `num_decodes` that decode."""
    rng, params = random.Random(length), SamplingParams(temperature=0.7, ignore_eos=True, max_tokens=None)
    others = [f"d{i}" for i in range(num_decodes)]
    for name in others:
        engine.add_request(name, [rng.randrange(5000) for _ in range(64)], params, stream=False)
    timed_steps(engine, 8 if others else 0)
    found: dict[str, list[float]] = {"first token": [], "stall": [], "step": []}
    host.clear()
    for i in range(rounds):
        prompt = [rng.randrange(5000) for _ in range(length)]
        began = time.perf_counter()
        engine.add_request(f"p{i}", prompt, SamplingParams(temperature=0.7, seed=i, max_tokens=1), stream=False)
        stalls, last, done = [], began, False
        while not done:
            done = any(output.request_id == f"p{i}" for output in engine.step())
            last, before = time.perf_counter(), last
            stalls.append(1000 * (last - before))
        found["first token"].append(1000 * (last - began))
        found["stall"].append(max(stalls))
        found["step"] += timed_steps(engine, 4 if others else 0)
    engine.abort_request(others)
    timed_steps(engine, 1 if others else 0)
    engine.reset_prefix_cache()
    return {name: statistics.median(times or [0.0]) for name, times in (found | {"host": host}).items()}


def sampling(args: argparse.Namespace, model: dict[str, Any]) -> Iterator[str]:
    """A line for each number of sequences and kind of sampling, with a column for each round."""
    with running(EngineConfig(**model, max_model_len=1024)) as engine:
        for num_seqs in args.num_seqs:
            rounds = [{kind: step_time(engine, num_seqs, kind) for kind in args.kinds} for _ in range(args.rounds)]
            for kind in args.kinds:
                yield f"{num_seqs:>4}  {kind:32}" + "".join(f"{times[kind]:>9.4f}" for times in rounds)


def formats(args: argparse.Namespace, model: dict[str, Any]) -> Iterator[str]:
    """A line for each engine, one after the other in this process."""
    common, first = model | {"max_model_len": 4096, "max_num_batched_tokens": BUDGET}, list[float]()
    for name, fields in parse_contenders(args.compare, common):
        began = time.perf_counter()
        with running(EngineConfig(**fields)) as engine:
            started = time.perf_counter() - began
            times = [step_time(engine, 1), step_time(engine, 256), prompts_time(engine)]
        first = first or times
        columns = "".join(f"{t:>10.3f} ({t / f:.2f})" for t, f in zip(times, first, strict=True))
        yield f"{name:32}{columns}   started in {started:.1f} s"


def prompts(args: argparse.Namespace, model: dict[str, Any]) -> Iterator[str]:
    """A line for each number of decodes and each length of a prompt."""
    with running(EngineConfig(**model, max_model_len=4096)) as engine:
        host = host_times(engine.executor._worker.runner)  # type: ignore[attr-defined]
        for num_decodes in args.decodes:
            for length in args.lengths:
                times = first_tokens(engine, host, num_decodes, length, args.rounds)
                columns = "".join(f"  {name} {ms:7.3f}" for name, ms in times.items())
                yield f"{num_decodes:>4} decodes, prompt {length:>5}:{columns}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b", choices=GEOMETRIES)
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("sampling")
    part.set_defaults(measure=sampling)
    part.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64])
    part.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    part.add_argument("--rounds", type=int, default=3)
    part = parts.add_parser("formats")
    part.set_defaults(measure=formats)
    part.add_argument("--compare", default=FORMATS, help="as `folovllm bench` has it; ratios are to the first")
    part = parts.add_parser("prompts")
    part.set_defaults(measure=prompts)
    part.add_argument("--decodes", type=int, nargs="+", default=[0, 16, 64, 200])
    part.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512, 1000, 1500, 2000])
    part.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(args.geometry, Path(folder), {"use_tqdm": False, "milestone": "m6"})
        for line in args.measure(args, model):
            print(line, flush=True)


if __name__ == "__main__":
    main()
