"""Time steps on a GPU, of a geometry with random weights: `python tools/measure_step.py`.

Milliseconds a decode step by how its tokens are sampled, medians, in rounds that take turns. `--compare` has an engine after the
other, say one for each format of the weights (`--kinds plain` then). `--prompts` also times 16,384 prompt tokens, from their
arrival to the tokens that follow them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from folovllm.apps.bench.contenders import parse_contenders
from folovllm.apps.bench.serve import finish, running
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from tools.gpu import parser_of, random_weights

PROMPT, SETTLE, STEPS = 128, 20, 100
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
    times = [time.perf_counter()]
    for _ in range(count):
        engine.step()
        times.append(time.perf_counter())
    return [1000 * (after - before) for before, after in pairwise(times)]


def step_time(engine: LLMEngine, num_seqs: int, kind: str = "plain") -> float:
    """Return the milliseconds of a decode step."""
    first, rest = KINDS[kind]
    for i in range(num_seqs):
        params = SamplingParams(
            temperature=0.7, seed=i, ignore_eos=True, max_tokens=SETTLE + STEPS + 8, **(rest if i else first)
        )
        engine.add_request(f"r{i}", [(37 * i + j) % 4000 for j in range(PROMPT)], params, stream=False)
    timed_steps(engine, SETTLE)
    times = timed_steps(engine, STEPS)
    finish(engine)
    engine.reset_prefix_cache()
    return statistics.median(times)


def prompts_time(engine: LLMEngine, length: int, count: int = 1) -> float:
    """Return the milliseconds of prompts of one length that come together, from their arrival to their tokens."""
    times, params = [], SamplingParams(max_tokens=1, ignore_eos=True)
    for number in range(TIMES + 1):  # the first one warms up
        rng = random.Random(f"{length} {number}")
        prompts = [[rng.randrange(4000) for _ in range(length)] for _ in range(count)]
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"p{number}.{i}", prompt, params, stream=False)
        finish(engine)
        times.append(1000 * (time.perf_counter() - began))
    engine.reset_prefix_cache()
    return statistics.median(times[1:])


def lines(engine: LLMEngine, args: argparse.Namespace) -> Iterator[str]:
    """What the command line asks for, measured."""
    for num_seqs in args.num_seqs:
        rounds = [{kind: step_time(engine, num_seqs, kind) for kind in args.kinds} for _ in range(args.rounds)]
        for kind in args.kinds:
            yield f"{num_seqs:>4}  {kind:32}" + "".join(f"{times[kind]:>9.4f}" for times in rounds)
    if args.prompts:
        yield f"      {BUDGET:,} prompt tokens            {prompts_time(engine, LONG_PROMPT, BUDGET // LONG_PROMPT):>9.3f}"


def main() -> None:
    """Print the lines of each engine."""
    parser = parser_of(__doc__, "qwen3-0.6b")
    parser.add_argument("--compare", default="m6", help="engines, as `folovllm bench` has it: m6,m6:quantization=int4")
    parser.add_argument("--num-seqs", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="; ".join(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", action="store_true", help=f"time {BUDGET:,} prompt tokens, too")
    args = parser.parse_args()
    with random_weights(args.geometry, max_model_len=4096, max_num_batched_tokens=BUDGET) as common:
        for name, fields in parse_contenders(args.compare, common):
            began = time.perf_counter()
            with running(EngineConfig(**fields)) as engine:
                print(f"{name}, started in {time.perf_counter() - began:.1f} s", flush=True)
                for line in lines(engine, args):
                    print(line, flush=True)


if __name__ == "__main__":
    main()
