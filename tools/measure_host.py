"""Time the engine's own work a step, over a device that does nothing: `python -m tools.measure_host`.

What is left is the host's: schedule, pack, guess, take in. Plain decoding and engines that may guess take turns, over texts
in which nothing comes twice, so that nothing is guessed. CPU microseconds of a step, the median of windows of some steps.
With `--answers` they serve short requests, in an order by chance, and the whole time counts: requests that come and end,
prompts, looks. A GPU's launches and copies are not in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from folovllm import LLM, EngineConfig, SamplingParams, build
from folovllm.engine.llm_engine import LLMEngine
from folovllm.executor.packed_executor import PackedExecutor
from folovllm.setup import EngineSetup
from folovllm.step.packed import Field, PackedStep
from folovllm.step.schedule import StepResult
from folovllm.step.token_bitmask import TokenBitmasks
from tools.measure_speculation import answer, requests

VOCAB = range(300, 4000)
PROMPT, SETTLING, WINDOW = 32, 30, 64  # tokens, steps


class Drawn:
    """A step that is over when it begins."""

    def __init__(self, num_samples: list[int], die: random.Random) -> None:
        self._num_samples, self._die = num_samples, die

    def wait(self) -> StepResult:
        """As `Pending`: one token for each share that draws. No guess is right."""
        tokens = iter(self._die.choices(VOCAB, k=len(self._num_samples)))
        return StepResult(
            [[token] if drawn else [] for token, drawn in zip(tokens, self._num_samples, strict=True)], {}
        )


class NoDevice(PackedExecutor):
    """Packs steps as for a device, and draws from a die."""

    def __init__(self, setup: EngineSetup, extension: object) -> None:
        widths = [1, 2, 4, *range(8, setup.max_num_seqs + 8, 8)]
        super().__init__(setup.max_num_seqs, setup.max_num_seqs * -(-setup.max_model_len // setup.block_size), widths)
        self._die = random.Random(0)

    def check(self) -> None:
        """As `PackedExecutor`."""

    def shutdown(self) -> None:
        """As `PackedExecutor`."""

    def expert_load(self) -> list[list[int]]:
        """As `PackedExecutor`."""
        return []

    def _send(self, step: PackedStep | TokenBitmasks) -> Drawn:
        assert isinstance(step, PackedStep)
        step.flatten()
        return Drawn(step.fields[Field.NUM_SAMPLES, : step.num_seqs].tolist(), self._die)

    def _send_ahead(self, step: PackedStep) -> None:
        raise NotImplementedError("nothing here has a form")


class Loop:
    """An engine without a device that decodes `batch` sequences, with new texts whenever they get long."""

    def __init__(self, batch: int, **overrides: Any) -> None:
        fields: dict[str, Any] = {"model": "stories-5m", "device": "cpu", "max_num_seqs": batch, "use_tqdm": False}
        kept = build.make_executor
        build.make_executor = NoDevice  # type: ignore[assignment]
        self.engine: LLMEngine = build.make_engine(EngineConfig(**fields, **overrides))
        build.make_executor = kept
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


def whole_answers(batch: int, configs: dict[str, dict[str, Any]], rounds: int) -> dict[str, list[float]]:
    """CPU microseconds of a step of each engine in each round, by the whole time of the stories' answers, `batch` at a time."""
    kept, build.make_executor = build.make_executor, NoDevice  # type: ignore[assignment]
    llms = {
        name: LLM("stories-5m", device="cpu", max_num_seqs=batch, use_tqdm=False, **config)
        for name, config in configs.items()
    }
    build.make_executor = kept
    found: dict[str, list[float]] = {name: [] for name in llms}
    times, names, die = -(-batch // len(requests(llms["plain"], "plain", 0.0)[0])), list(llms), random.Random(0)
    for turn in range(rounds):
        work = requests(llms["plain"], "plain", 0.8, times, 1000 * turn)
        die.shuffle(names)
        for name in names:
            found[name].append(1e6 * batch * answer(llms[name], *work, batch).seconds)
    return found


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
    parser.add_argument(
        "--answers", action="store_true", help="time whole answers, not steps in the middle of long ones"
    )
    arguments = parser.parse_args()
    for batch in arguments.batches:
        configs: dict[str, dict[str, Any]] = {"plain": {}, "plain again": {}}
        for method in arguments.methods:
            configs[method] = {"speculative_config": {"method": method, "num_speculative_tokens": 8}}
        found = (whole_answers if arguments.answers else windows)(batch, configs, arguments.rounds)
        plain = statistics.median(found["plain"])
        told = (
            f"{name} {(us := statistics.median(own)):.1f} us ({us / plain - 1:+.1%})" for name, own in found.items()
        )
        print(f"{batch} sequences: " + ", ".join(told), flush=True)


if __name__ == "__main__":
    main()
