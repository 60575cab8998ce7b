"""What a format of weights or of the cache does to steps on a GPU: `python -m tools.measure_formats`.

A geometry with random weights, one engine after the other in one process. Of each: milliseconds a decode step of one
sequence and of 256 (medians of 100), and of prompts of 16,384 tokens in all (the median of 5); and each over the first
engine's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from folovllm.bench.contenders import GEOMETRIES, parse_contenders, random_model
from folovllm.bench.serve import running
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from tools.measure_step import step_time

CONTENDERS = "m6,m6:quantization=fp8,m6:quantization=int8,m6:quantization=int4"
BUDGET, PROMPT, TIMES = 16_384, 2048, 5


def prompts_time(engine: LLMEngine) -> float:
    """Median milliseconds of prompts that fill a step, from their arrival to their tokens."""
    times = []
    for number in range(TIMES + 1):  # the first one warms up
        rng = random.Random(number)
        prompts = [[rng.randrange(5000) for _ in range(PROMPT)] for _ in range(BUDGET // PROMPT)]
        began = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(f"p{number}.{i}", prompt, SamplingParams(max_tokens=1, ignore_eos=True), stream=False)
        while engine.has_unfinished_requests():
            engine.step()
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def main() -> None:
    """A line for each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-4b", choices=GEOMETRIES)
    parser.add_argument("--compare", default=CONTENDERS, help="as `folovllm bench` has it; the first is the measure")
    args = parser.parse_args()
    print(f"{args.geometry}; milliseconds a step of 1 and of 256 sequences, and of {BUDGET:,} tokens of prompts")
    with tempfile.TemporaryDirectory() as folder:
        common = {"max_model_len": 4096, "max_num_batched_tokens": BUDGET, "use_tqdm": False}
        model, first = random_model(args.geometry, Path(folder), common), []
        for name, fields in parse_contenders(args.compare, model):
            began = time.perf_counter()
            with running(EngineConfig(**fields)) as engine:
                started = time.perf_counter() - began
                times = [step_time(engine, 1, "plain"), step_time(engine, 256, "plain"), prompts_time(engine)]
            first = first or times
            columns = "".join(f"{t:>10.3f} ({t / f:.2f})" for t, f in zip(times, first, strict=True))
            print(f"{name:32}{columns}   started in {started:.1f} s", flush=True)


if __name__ == "__main__":
    main()
