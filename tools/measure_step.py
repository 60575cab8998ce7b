"""Time steps on a GPU, of a geometry with random weights: `python tools/measure_step.py`. The GPU must hold all engines at once.

Milliseconds of a decode step by how its tokens are sampled, and of prompts from their arrival to the tokens that follow them.
Engines are presets (`--compare m6,m6:quantization=int4`), each in every format of its checkpoint (`--formats`) and on every
number of GPUs (`--ranks`). Each round has all engines at each point, and every second round has them in the other order. The
table: medians, and the median over the rounds of the first engine's time divided by this one's (above 1: faster).

`--kernels` prints what the steps of each point are made of: each kernel, how often it is called a step and its microseconds a
call, in the model itself, where no layer's weights are found in the L2 cache. Nothing else is printed then. The floor of a kernel
is the bytes that it moves, divided by the rate of a copy, which is printed first.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from folovllm.apps.bench.contenders import parse_contenders
from folovllm.apps.bench.serve import finish, running
from folovllm.config import EngineConfig
from folovllm.electives.quantization.config import compressed_config
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from tools.beside_vllm import WEIGHTS
from tools.gpu import card_rates, in_turns, parser_of, print_row, random_weights

PROMPT, SETTLE, STEPS, TIMES, KERNELS = 128, 20, 100, 5, 30
Watch = Callable[[int], AbstractContextManager[None]]  # of so many steps
# With as many blocks several engines fit on a card.
COMMON = {"block_size": 16, "num_kv_blocks": 4400, "max_model_len": 16_384, "max_num_batched_tokens": 16_384}
PLAIN, GROUPS_OF_32 = "16-bit", {"strategy": "group", "group_size": 32}  # as Q8_0 and Q4_0 of a GGUF file become
FORMATS: dict[str, dict[str, Any] | None] = {
    PLAIN: None, **WEIGHTS,
    "int8": compressed_config("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "q8_0": compressed_config("int-quantized", {"num_bits": 8, **GROUPS_OF_32}),
    "q4_0": compressed_config("pack-quantized", {"num_bits": 4, **GROUPS_OF_32}),
}  # fmt: skip
FILTERED: dict[str, Any] = {"top_k": 50, "top_p": 0.9}
PENALISED: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.5}
FORMED: dict[str, Any] = {"structured_outputs": {"regex": "[a-z ]{3000}"}}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # how one of the sequences is sampled, and all others
    "plain": ({}, {}),
    "top_k 50, top_p 0.9": (FILTERED, FILTERED),
    "one with a penalty": (PENALISED, {}),
    "penalties, top_k, top_p": (PENALISED | FILTERED, PENALISED | FILTERED),
    "one with logprobs": ({"logprobs": 5}, {}),
    "one with a regex": (FORMED, {}),  # these two need llguidance
    "all with a regex": (FORMED, FORMED),
}


def timed_steps(engine: LLMEngine, count: int) -> list[float]:
    """Run `count` steps; return the milliseconds of each."""
    times = [time.perf_counter()]
    for _ in range(count):
        engine.step()
        times.append(time.perf_counter())
    return [1000 * (after - before) for before, after in pairwise(times)]


def unwatched(steps: int) -> AbstractContextManager[None]:
    return nullcontext()


@contextmanager
def kernels_shown(steps: int) -> Iterator[None]:
    """Print the kernels of what runs in the block, which are so many steps: the longest first."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        yield
    times = {each: each.self_device_time_total if on_gpu else each.self_cpu_time_total for each in found.key_averages()}
    print_row("  kernel", "us a step", "calls a step", "us a call")
    for each in sorted(times, key=lambda each: -times[each])[:KERNELS]:
        print_row(f"  {each.key[:33]}", times[each] / steps, each.count / steps, times[each] / each.count)


def step_time(engine: LLMEngine, num_seqs: int, kind: str = "plain", watch: Watch = unwatched) -> float:
    """Return the milliseconds of a decode step."""
    first, rest = KINDS[kind]
    for i in range(num_seqs):
        own = rest if i else first
        params = SamplingParams(temperature=0.7, seed=i, ignore_eos=True, max_tokens=SETTLE + STEPS + 8, **own)
        engine.add_request(f"r{i}", [(37 * i + j) % 4000 for j in range(PROMPT)], params, stream=False)
    timed_steps(engine, SETTLE)
    with watch(STEPS):
        times = timed_steps(engine, STEPS)
    finish(engine)
    engine.reset_prefix_cache()
    return median(times)


def prompts_time(engine: LLMEngine, length: int, count: int = 1, watch: Watch = unwatched) -> float:
    """Return the milliseconds of prompts of one length that come together, from their arrival to their tokens."""
    times, params = [], SamplingParams(max_tokens=1, ignore_eos=True)
    for number in range(TIMES + 1):  # the first one warms up
        rng = random.Random(f"{length} {number}")
        prompts = [[rng.randrange(4000) for _ in range(length)] for _ in range(count)]
        with watch(1) if number == TIMES else nullcontext():
            began = time.perf_counter()
            for i, prompt in enumerate(prompts):
                engine.add_request(f"p{number}.{i}", prompt, params, stream=False)
            finish(engine)
            times.append(1000 * (time.perf_counter() - began))
    engine.reset_prefix_cache()
    return median(times[1:])


def points_of(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[LLMEngine], float]]]:
    """What is measured of an engine, by name."""
    watch = kernels_shown if args.kernels else unwatched
    for num_seqs in args.num_seqs:
        for kind in args.kinds:
            yield f"{num_seqs:>4} {kind}", partial(step_time, num_seqs=num_seqs, kind=kind, watch=watch)
    for prompts in args.prompts:
        count, _, length = prompts.rpartition("x")
        yield f"prompts: {prompts}", partial(prompts_time, length=int(length), count=int(count or 1), watch=watch)


def main() -> None:
    """Start the engines, and print each round and the table."""
    parser = parser_of(__doc__, "qwen3-0.6b")
    parser.add_argument("--compare", default="m6", help="presets, as `folovllm bench` has it: m6,m6:quantization=int4")
    parser.add_argument("--formats", nargs="+", default=[PLAIN], choices=FORMATS, help="of the checkpoint's weights")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="GPUs of an engine")
    parser.add_argument("--num-seqs", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="; ".join(KINDS))
    parser.add_argument(
        "--prompts", nargs="*", default=[], help="tokens of a prompt, or 8x2048: of eight that come together"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", action="store_true", help="show them in place of times")
    args = parser.parse_args()
    if args.kernels:
        card_rates()
    engines: dict[str, LLMEngine] = {}
    with ExitStack() as stack:
        for weights in args.formats:
            changes = {"quantization_config": FORMATS[weights]} if FORMATS[weights] else {}
            common = stack.enter_context(random_weights(args.geometry, changes, **COMMON))
            for ranks in args.ranks:
                for preset, fields in parse_contenders(args.compare, common | {"tensor_parallel_size": ranks}):
                    name, began = f"{preset}, {weights}, {ranks} GPU", time.perf_counter()
                    engines[name] = stack.enter_context(running(EngineConfig(**fields)))
                    print(f"{name} started in {time.perf_counter() - began:.1f} s", flush=True)
        points = dict(points_of(args))
        times: dict[str, dict[str, list[float]]] = {point: {name: [] for name in engines} for point in points}
        if args.kernels:
            for name, point in product(engines, points):
                print(f"{name}, {point}")
                points[point](engines[name])
            return
        for number, name in in_turns(list(engines), args.rounds):
            for point, measure in points.items():
                times[point][name].append(measure(engines[name]))
            print(
                f"{number} {name}: " + ", ".join(f"{of_engines[name][-1]:.3f}" for of_engines in times.values()),
                flush=True,
            )
    for point, of_engines in times.items():
        print(f"{point}, ms, and how many times faster than the first")
        first = next(iter(of_engines.values()))
        for name, own in of_engines.items():
            print_row(f"  {name}", median(own), median(a / b for a, b in zip(first, own, strict=True)))


if __name__ == "__main__":
    main()
