"""Time long prompts on a GPU, with and without what they have of their own: `python tools/measure_long.py`.

Random weights, prompts that share nothing, steps of at most 16,384 tokens. Seconds for each work, of rounds that take turns
in one engine: with the prefill for Hopper and a last layer that computes only what is read ("now"), and without either. Then
the kernels of one step of two prompts, by their time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from folovllm.bench.contenders import GEOMETRIES, random_model
from folovllm.build import make_engine
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.hopper import prefill as prefill_hopper
from folovllm.models import fused_layer
from folovllm.sampling_params import SamplingParams

WORKS = [(1, 8000, 1), (32, 8000, 1), (32, 8000, 32), (8, 15_000, 32)]  # prompts, tokens of each, tokens of an answer
NOW = {"long step": prefill_hopper.LONG_STEP, "many": fused_layer.MANY}
NEVER = 1 << 40
PATHS = {
    "now": NOW,
    "no last layer": NOW | {"many": NEVER},
    "no kernel": NOW | {"long step": NEVER},
    "neither": {"long step": NEVER, "many": NEVER},
}


def take(path: str) -> None:
    """From here on long prompts go this way."""
    prefill_hopper.LONG_STEP, fused_layer.MANY = PATHS[path]["long step"], PATHS[path]["many"]


def work(engine: LLMEngine, count: int, length: int, answer: int) -> float:
    """Seconds from the first prompt's arrival to the last token."""
    prompts = [[(37 * i + 11 * j) % 5000 + i for j in range(length)] for i in range(count)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=answer)
    began = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"r{i}", prompt, params, stream=False)
    while engine.has_unfinished_requests():
        engine.step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    engine.reset_prefix_cache()
    return seconds


def print_kernels(engine: LLMEngine) -> None:
    """The kernels of a step of two prompts of 8,000 tokens, the longest first, in milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work(engine, 2, 8000, 1)
    found = sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)
    print(f"kernels of 2 x 8,000: {sum(event.device_time_total for event in found) / 1e3:.1f} ms")
    for event in found[:9]:
        print(f"{event.device_time_total / 1e3:9.2f} {event.count:5d}  {event.key[:90]}")


def main() -> None:
    """A line for each path and round, then the kernels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="qwen3-0.6b")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS), metavar="PATH")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {"milestone": "m6", "max_model_len": 16_384, "max_num_batched_tokens": 16_384,
                                  "max_num_seqs": 64, "use_tqdm": False}  # fmt: skip
        engine = make_engine(EngineConfig(**random_model(args.geometry, Path(folder), fields)))
        print(f"{'':16}" + "".join(f"{f'{n} x {length:,}, {answer}':>16}" for n, length, answer in WORKS))
        for path in args.paths * args.rounds:
            take(path)
            work(engine, 2, 3000, 2)
            print(f"{path:16}" + "".join(f"{work(engine, *sizes):16.3f}" for sizes in WORKS), flush=True)
        take("now")
        print_kernels(engine)
        engine.close()


if __name__ == "__main__":
    main()
