"""Time a token on a GPU by how it is drawn: `python tools/measure_step.py`.

Qwen3-0.6B's geometry with random weights, prompts of 128 tokens; milliseconds a decode step of as many sequences, in which
each gets a token. Medians over 100 steps, of rounds that take turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from folovllm.bench.contenders import random_model
from folovllm.build import make_engine
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams

PROMPT, SETTLE, STEPS = 128, 20, 100
FILTERED: dict[str, Any] = {"top_k": 50, "top_p": 0.9}
PENALISED: dict[str, Any] = {"repetition_penalty": 1.1, "presence_penalty": 0.5}
FORMED: dict[str, Any] = {"structured_outputs": {"regex": "[a-z ]{3000}"}}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # how one of the sequences is drawn, and all others
    "plain": ({}, {}),
    "top_k 50, top_p 0.9": (FILTERED, FILTERED),
    "one with a penalty": (PENALISED, {}),
    "penalties, top_k 50, top_p 0.9": (PENALISED | FILTERED, PENALISED | FILTERED),
    "one with logprobs": ({"logprobs": 5}, {}),
    "one with a regex": (FORMED, {}),  # these two need llguidance
    "all with a regex": (FORMED, FORMED),
}


def step_time(engine: LLMEngine, num_seqs: int, kind: str) -> float:
    """Median milliseconds of a decode step."""
    first, rest = KINDS[kind]
    for i in range(num_seqs):
        params = SamplingParams(
            temperature=0.7, seed=i, ignore_eos=True, max_tokens=SETTLE + STEPS + 8, **(rest if i else first)
        )
        engine.add_request(f"r{i}", [(37 * i + j) % 5000 for j in range(PROMPT)], params, stream=False)
    for _ in range(SETTLE):
        engine.step()
    times, last = [], time.perf_counter()
    for _ in range(STEPS):
        engine.step()
        last, before = time.perf_counter(), last
        times.append(1000 * (last - before))
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()
    return statistics.median(times)


def main() -> None:
    """A line for each number of sequences and kind of draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {"milestone": "m6", "max_model_len": 1024, "use_tqdm": False}
        began = time.perf_counter()
        engine = make_engine(EngineConfig(**random_model("qwen3-0.6b", Path(folder), fields)))
        print(f"started in {time.perf_counter() - began:.1f} s; milliseconds a step, a column for each round")
        for num_seqs in args.num_seqs:
            rounds = [{kind: step_time(engine, num_seqs, kind) for kind in args.kinds} for _ in range(args.rounds)]
            for kind in args.kinds:
                print(f"{num_seqs:>4}  {kind:32}" + "".join(f"{times[kind]:>9.4f}" for times in rounds), flush=True)
        engine.close()


if __name__ == "__main__":
    main()
