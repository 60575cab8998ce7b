"""Time a prompt beside decodes on a GPU: `python tools/measure_prompts.py`.

Qwen3-0.6B's geometry (or another) with random weights. While some sequences decode, prompts come one after the other. For
each: milliseconds from its arrival to its token ("first token"; of them in the host's code that starts a step with a prompt,
"host"), and between two tokens of the others meanwhile ("stall"; "step" is a step without a prompt). Medians.
"""

from __future__ import annotations

import argparse
import random
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


class HostClock:
    """Notes how long the host takes to start each step that is no decode step."""

    def __init__(self, runner: Any) -> None:
        self.times: list[float] = []
        start = runner.execute_model

        def timed(step: Any) -> Any:
            began = time.perf_counter()
            pending = start(step)
            if not step.is_decode:
                self.times.append(1000 * (time.perf_counter() - began))
            return pending

        runner.execute_model = timed


def first_tokens(engine: LLMEngine, clock: HostClock, num_decodes: int, length: int, rounds: int) -> dict[str, float]:
    """Median milliseconds by name."""
    rng, params = random.Random(length), SamplingParams(temperature=0.7, ignore_eos=True, max_tokens=None)
    others = [f"d{i}" for i in range(num_decodes)]
    for name in others:
        engine.add_request(name, [rng.randrange(5000) for _ in range(64)], params, stream=False)
    for _ in range(8):
        engine.step() if others else None
    found: dict[str, list[float]] = {"first token": [], "stall": [], "step": []}
    clock.times.clear()
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
        for _ in range(4 if others else 0):
            engine.step()
            last, before = time.perf_counter(), last
            found["step"].append(1000 * (last - before))
    for name in others:
        engine.abort_request(name)
    engine.step() if others else None
    engine.reset_prefix_cache()
    return {name: statistics.median(times or [0.0]) for name, times in (found | {"host": clock.times}).items()}


def main() -> None:
    """A line for each number of decodes and each length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", default="qwen3-0.6b")
    parser.add_argument("--decodes", type=int, nargs="+", default=[0, 16, 64, 200])
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128, 512, 1000, 1500, 2000])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = {"milestone": "m6", "max_model_len": 4096, "use_tqdm": False}
        began = time.perf_counter()
        engine = make_engine(EngineConfig(**random_model(args.geometry, Path(folder), fields)))
        print(f"started in {time.perf_counter() - began:.1f} s; milliseconds")
        clock = HostClock(engine.executor._worker.runner)  # type: ignore[attr-defined]
        for num_decodes in args.decodes:
            for length in args.lengths:
                times = first_tokens(engine, clock, num_decodes, length, args.rounds)
                print(f"{num_decodes:>4} decodes, prompt {length:>5}:"
                      + "".join(f"  {name} {ms:7.3f}" for name, ms in times.items()), flush=True)  # fmt: skip
        engine.close()


if __name__ == "__main__":
    main()
