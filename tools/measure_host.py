"""Time the engine's own work a step, over a device that does nothing: `python -m tools.measure_host`.

What is left is the host's: schedule, pack, propose draft tokens, process the results. Plain engines and engines with
speculation take turns, over texts in which nothing comes twice, so that nothing is proposed. CPU microseconds of a step, the
median of windows of some steps. A GPU's launches and copies are not in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any
from unittest.mock import patch

from folovllm import EngineConfig, SamplingParams, build
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.engine.setup import EngineSetup
from folovllm.executor.packed_executor import PackedExecutor
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.packed import Field, PackedStep
from folovllm.step.schedule import StepResult

VOCAB = range(300, 4000)
PROMPT, SETTLING, WINDOW = 32, 30, 64  # tokens, steps


class Sampled:
    """A step that ends at a time of the monotonic clock."""

    def __init__(self, num_samples: list[int], die: random.Random, end: float) -> None:
        self._num_samples, self._die, self._end = num_samples, die, end

    def wait(self) -> StepResult:
        """Return one token for each sequence that samples; no draft token is accepted."""
        if self._end:
            time.sleep(max(0.0, self._end - time.monotonic()))
        tokens = iter(self._die.choices(VOCAB, k=len(self._num_samples)))
        return StepResult([[token] if n else [] for token, n in zip(tokens, self._num_samples, strict=True)], {})


class NoDevice(PackedExecutor):
    """Packs steps as for a device, and samples from a die. A step takes `seconds`, none of them on the CPU."""

    seconds = 0.0

    def __init__(self, setup: EngineSetup, extension: object) -> None:
        widths = [1, 2, 4, *range(8, setup.max_num_seqs + 8, 8)]
        super().__init__(setup.max_num_seqs, setup.max_num_seqs * -(-setup.max_model_len // setup.block_size), widths)
        self._die, self._free_at = random.Random(0), 0.0

    def shutdown(self) -> None: ...

    def collective_rpc(self, function: Any, *arguments: Any) -> list[Any]:
        return []

    def _send(self, step: PackedStep | TokenBitmasks) -> Sampled:
        assert isinstance(step, PackedStep)
        step.flatten()
        if self.seconds:  # steps follow each other on the device
            self._free_at = max(self._free_at, time.monotonic()) + self.seconds
        return Sampled(step.fields[Field.NUM_SAMPLES, : step.num_seqs].tolist(), self._die, self._free_at)


def engine_over(device: type[NoDevice], config: EngineConfig) -> LLMEngine:
    """An engine as `make_engine` makes it, but for the device."""
    with patch.object(build, "make_executor", device):
        return make_engine(config)


class Loop:
    """An engine without a device that decodes `batch` sequences, with new texts whenever they get long."""

    def __init__(self, batch: int, **overrides: Any) -> None:
        fields: dict[str, Any] = {"model": "stories-5m", "device": "cpu", "max_num_seqs": batch, "use_tqdm": False}
        self.engine = engine_over(NoDevice, EngineConfig(**fields, **overrides))
        self._ids, self._die, self._left = [str(i) for i in range(batch)], random.Random(1), 0

    def window(self, steps: int) -> float:
        """CPU seconds of a step, on average over some."""
        if self._left < steps:
            self._begin()
        self._left -= steps
        start = time.process_time()
        for _ in range(steps):
            self.engine.step()
        return (time.process_time() - start) / steps

    def _begin(self) -> None:
        """New texts, and some steps: the prompts, and until what guesses has found out that it cannot."""
        self.engine.abort_request(self._ids)
        self._left = self.engine.setup.max_model_len - PROMPT - SETTLING - 1
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=self._left + SETTLING)
        for name in self._ids:
            prompt = {"prompt_token_ids": self._die.choices(VOCAB, k=PROMPT)}
            self.engine.add_request(name, prompt, params, stream=False)
        for _ in range(SETTLING):
            self.engine.step()


def windows(batch: int, configs: dict[str, dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """CPU microseconds of a step of each engine, on average over each of some windows."""
    loops = {name: Loop(batch, **config) for name, config in configs.items()}
    found: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            found[name].append(1e6 * loop.window(WINDOW))
    return found


def main() -> None:
    """Print a line for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 256])
    parser.add_argument("--methods", nargs="*", default=["ngram", "suffix"])
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    for batch in arguments.batches:
        configs: dict[str, dict[str, Any]] = {"plain": {}, "plain again": {}}
        for method in arguments.methods:
            configs[method] = {"speculative_config": {"method": method, "num_speculative_tokens": 8}}
        found = windows(batch, configs, arguments.rounds)
        plain = statistics.median(found["plain"])
        medians = {name: statistics.median(own) for name, own in found.items()}
        columns = (f"{name} {us:.1f} us ({us / plain - 1:+.1%})" for name, us in medians.items())
        print(f"{batch} sequences: " + ", ".join(columns), flush=True)


if __name__ == "__main__":
    main()
