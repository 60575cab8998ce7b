"""`make recordings`: the recordings that the book and the page's tests show, of the real engine with the embedded model.

Requests come at given turns, seeds are fixed and the clock is made up, so that a recording is the same wherever it is made:
a step takes 4 ms and 50 microseconds a token. `--check` compares the events, without times, with those in the files.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.inspector.recorder import Recorder
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput, StepResult
from milestones.running_example import example

ROOT = Path(__file__).resolve().parents[1]
BOOK, SAMPLES = ROOT / "docs" / "assets" / "recordings", ROOT / "tests" / "inspector" / "data"
MOST_BYTES = 50 * 1024
LONG = (
    "Once upon a time, in a small house near the sea, there lived a girl named Lily. She had a red kite and a little dog. "
    "Every day she went to the beach with her dog to fly the kite. "
)


@dataclass(slots=True, frozen=True)
class Ask:
    """A request: at which turn it comes, and at which it is aborted, if ever."""

    turn: int
    prompt: str
    max_tokens: int
    until: int | None = None
    name: str = ""  # a letter in the order of the asks, if none is given


@dataclass(slots=True, frozen=True)
class Scene:
    """What is played for a recording."""

    file: Path
    title: str
    engine: dict[str, Any]
    asks: list[Ask] = field(default_factory=list)


FIVE = [
    Ask(0, "Once upon a time there was a little", 40),
    Ask(0, "The sea was", 12),
    Ask(0, "Lily had a red kite. One day", 56),
    Ask(4, "Tom and his dog went to the park. They", 20),
    Ask(6, "One day, a bird", 30),
    Ask(20, "Ben was sad because", 24),
]
NINE = [
    *FIVE,
    Ask(2, "The cat sat on the mat and", 50),
    Ask(3, "Mia found a shiny stone in the", 44),
    Ask(5, "A big dog ran to the", 48),
]
MEMORY = {"max_model_len": 96}  # as slots three of them, as blocks of 8 tokens 36
ABC = [Ask(each.turn, each.prompt, each.max_tokens, name=each.name) for each in example().requests]
DRAFT = {"method": "draft_model", "model": "stories-draft", "num_speculative_tokens": 4, "adaptive": False}
CACHE = [
    Ask(0, LONG + "One day,", 16),
    Ask(3, LONG + "The dog", 16),
    Ask(5, "Tom liked to draw. He drew a cat.", 30),
    Ask(8, LONG + "Her mom", 20, until=16),
    Ask(24, "Sam and Mia were in the garden. They saw a big, green frog and a butterfly. " + LONG, 12),
    Ask(40, LONG + "One day,", 12),
]


def abc(name: str, title: str, milestone: str) -> Scene:
    """A, B and C, whom the chapters follow, for the book."""
    return Scene(BOOK / f"{name}.jsonl", title, {"milestone": milestone, **example().engine[milestone]}, ABC)


SCENES = [
    Scene(SAMPLES / "m1.jsonl", "One request at a time", {"milestone": "m1", **MEMORY}, FIVE[:3]),
    Scene(SAMPLES / "m2.jsonl", "Three slots", {"milestone": "m2", "num_kv_blocks": 3, **MEMORY}, FIVE),
    Scene(
        SAMPLES / "m3.jsonl",
        "Blocks, and a preemption",
        {"milestone": "m3", "num_kv_blocks": 12, "block_size": 8, "max_num_seqs": 4, **MEMORY},
        FIVE,
    ),
    Scene(
        SAMPLES / "m5.jsonl",
        "Shared prefixes and chunks",
        {"milestone": "m5", "num_kv_blocks": 24, "block_size": 8, "max_num_seqs": 3, "max_num_batched_tokens": 24,
         "max_model_len": 160},
        CACHE,
    ),
    Scene(
        SAMPLES / "m6.jsonl",
        "Steps that overlap",
        {"milestone": "m6", "num_kv_blocks": 24, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 24,
         "max_model_len": 160},
        CACHE,
    ),
    abc("2_one_at_a_time", "One request at a time", "m1"),
    abc("2_continuous_batching", "A batch that changes at every step", "m2"),
    Scene(BOOK / "3_slots.jsonl", "Slots", {"milestone": "m2", "num_kv_blocks": 3, **MEMORY}, NINE),
    Scene(
        BOOK / "3_blocks.jsonl",
        "Blocks, in the same memory",
        {"milestone": "m3", "num_kv_blocks": 18, "block_size": 16, **MEMORY},
        NINE,
    ),
    abc("6_abc", "A, B and C: everything on one clock", "m6"),
    Scene(
        BOOK / "x3_guesses.jsonl",
        "A draft model proposes, the model verifies",
        {"milestone": "m5", "num_kv_blocks": 14, "block_size": 8, "speculative_config": DRAFT, **MEMORY},
        FIVE[:1] + FIVE[2:3],
    ),
]  # fmt: skip


class Clock:
    """A time that passes only where it is told to, and a little with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 20e-6
        return self.now


class TimedExecutor:
    """An executor whose steps take a made-up time."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner, self._clock, self._free_at = inner, clock, 0.0
        self.num_kv_blocks, self.shutdown = inner.num_kv_blocks, inner.shutdown
        self.graph_widths = getattr(inner, "graph_widths", ())

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        result: StepResult = self._inner.execute_model(output)
        self._clock.now += cost(output)
        return result

    def submit(self, output: SchedulerOutput) -> Any:
        pending, clock = self._inner.submit(output), self._clock
        self._free_at = ends = max(clock.now, self._free_at) + cost(output)

        class Pending:
            @staticmethod
            def wait() -> StepResult:
                clock.now = max(clock.now, ends)
                return pending.wait()

        return Pending()


def cost(output: SchedulerOutput) -> float:
    """Seconds of a step."""
    return 4e-3 + 50e-6 * output.num_tokens


@contextmanager
def virtual_clock(engine: LLMEngine) -> Iterator[Clock]:
    """Let the engine read a clock that is made up."""
    clock = Clock()
    engine.core.executor = TimedExecutor(engine.executor, clock)
    with patch("time.monotonic", clock):
        yield clock


def play(scene: Scene, file: Path) -> None:
    """Record a scene."""
    options = {"device": "cpu", "use_tqdm": False, "num_threads": 1}
    engine = make_engine(EngineConfig(**options | scene.engine))
    with virtual_clock(engine), file.open("wb") as out:
        recorder = Recorder(engine, out.write, title=scene.title, is_virtual=True)
        turn = 0
        while turn <= max(ask.turn for ask in scene.asks) or engine.has_unfinished_requests():
            for letter, ask in zip("abcdefghi", scene.asks, strict=False):
                name = ask.name or letter
                if ask.turn == turn:
                    params = SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True)
                    engine.add_request(name, ask.prompt, params, stream=False)
                if ask.until == turn:
                    engine.abort_request(name)
            engine.step()
            turn += 1
        recorder.close()
    engine.close()


def without_times(file: Path) -> list[Any]:
    """What happened: the lines of a recording with every time at 0, and the sequences counted from 0."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines[1:]:
        if line[0] != "texts":
            line[2] = 0
        for event in line[3] if line[0] == "turn" else ():
            times = {"add": (7,), "begin": (2, 3), "end": (2, 3, 4)}.get(event[0], ())
            for place in times:
                event[place] = 0
    return lines


def main() -> None:
    """Write the recordings, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for scene in SCENES:
            made = Path(folder, "made.jsonl")
            play(scene, made)
            size, name = made.stat().st_size, scene.file.relative_to(ROOT)
            if size > MOST_BYTES:
                sys.exit(f"{name} would have {size} bytes, more than {MOST_BYTES}")
            if wanted.check and without_times(made) != without_times(scene.file):
                sys.exit(f"{name}: the engine does something else by now. Look at it, then: make recordings")
            if not wanted.check:
                scene.file.parent.mkdir(parents=True, exist_ok=True)
                scene.file.write_bytes(made.read_bytes())
            print(f"{name}: {size} bytes")


if __name__ == "__main__":
    main()
