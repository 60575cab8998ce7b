"""`make recordings`: the recordings that the book and the page's tests show, of the real engine with the embedded model.

Requests come at given turns, seeds are fixed and the clock is made up, so that a recording is the same wherever it is made:
a step takes 4 ms and 50 microseconds a token. `--check` compares the events, without times, with those in the files.

The times of the scene *milestones* are measured, one recording after the other, so it is only made where it is asked for:
`--measured`, on a GPU with `--device cuda`, and `--check` leaves it out. On a CPU the clock is the time that this process computed, whatever else runs there.
Of five recordings the fastest is kept.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from folovllm.apps.inspector.playground import Settings, config_fields
from folovllm.apps.inspector.recorder import Recorder
from folovllm.apps.inspector.scenes import Sampling, Scene, Words, params_of, scenes
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput, StepResult
from milestones.running_example import example

ROOT = Path(__file__).resolve().parents[1]
BOOK, SAMPLES = ROOT / "docs" / "assets" / "recordings", ROOT / "tests" / "inspector" / "data"
MEASURED, REPEATS = "milestones", 5  # the scene whose times are measured, and how often
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
    sampling: Sampling | None = None  # greedy


@dataclass(slots=True, frozen=True)
class Take:
    """What is played for a recording. `scene` goes into its header: what the page says beside it, and where it begins and stops."""

    file: Path
    title: str
    engine: dict[str, Any]
    asks: list[Ask] = field(default_factory=list)
    scene: dict[str, Any] | None = None
    is_measured: bool = False


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


def abc(name: str, title: str, milestone: str, scene: dict[str, Any] | None = None) -> Take:
    """A, B and C, whom the chapters follow, for the book."""
    return Take(BOOK / f"{name}.jsonl", title, {"milestone": milestone, **example().engine[milestone]}, ABC, scene)


def asked(start: int, stop: int, question: str, zh: str) -> dict[str, Any]:
    """From where a recording of a chapter plays, and the question at which it stops. The chapter says the rest."""
    words, words_zh = Words(title="", watch="", question=question), Words(title="", watch="", question=zh)
    return {"start": start, "stop": stop, "words": words, "zh": words_zh}


PAGED = {"block_size": 8, "max_num_seqs": 4}
CHUNKED = PAGED | {"num_kv_blocks": 24, "max_num_batched_tokens": 24, "max_model_len": 160}
TAKES = [
    Take(SAMPLES / "m1.jsonl", "One request at a time", {"milestone": "m1", **MEMORY}, FIVE[:3]),
    Take(SAMPLES / "m2.jsonl", "Three slots", {"milestone": "m2", "num_kv_blocks": 3, **MEMORY}, FIVE),
    Take(SAMPLES / "m3.jsonl", "Blocks, and a preemption", {"milestone": "m3", "num_kv_blocks": 12, **PAGED, **MEMORY}, FIVE),
    Take(SAMPLES / "m5.jsonl", "Shared prefixes and chunks", {"milestone": "m5", **CHUNKED, "max_num_seqs": 3}, CACHE),
    Take(SAMPLES / "m6.jsonl", "Steps that overlap", {"milestone": "m6", **CHUNKED}, CACHE),
    abc("2_one_at_a_time", "One request at a time", "m1",
        asked(2, 6, "B's answer on the right ends with the next step. When does C begin, here and there?",
              "右边 B 的回答下一步就结束。C 在两边各在什么时候开始？")),
    abc("2_continuous_batching", "A batch that changes at every step", "m2"),
    Take(BOOK / "3_slots.jsonl", "Slots", {"milestone": "m2", "num_kv_blocks": 3, **MEMORY}, NINE,
         asked(5, 12, "B's slot is free now. How many of the five that wait may begin on the left?",
               "B 的槽现在空了。左边等待的五个请求里，有几个可以开始？")),
    Take(BOOK / "3_blocks.jsonl", "Blocks, in the same memory",
         {"milestone": "m3", "num_kv_blocks": 18, "block_size": 16, **MEMORY}, NINE,
         asked(24, 32, "No block is free, and I, which came last, needs another one. Who gives its blocks back?",
               "没有空闲块了，最后到的 I 还要一块。谁会交回自己的块？")),
    abc("6_abc", "A, B and C: everything on one clock", "m6",
        asked(3, 6, "No block is free, and C needs another one. Who gives its blocks back?",
              "没有空闲块了，C 还要一块。谁会交回自己的块？")),
    Take(BOOK / "x3_guesses.jsonl", "A draft model proposes, the model verifies",
         {"milestone": "m5", "num_kv_blocks": 14, "block_size": 8, "speculative_config": DRAFT, **MEMORY}, FIVE[:1] + FIVE[2:3],
         asked(2, 5, "None of A's twelve draft tokens was accepted, and of B's four the last step accepted all. What comes next?",
               "A 的十二个草稿 token 一个也没被接受；上一步 B 的四个全被接受。接下来呢？")),
]  # fmt: skip


def takes_of(scene: Scene) -> Iterator[Take]:
    """The recordings of a scene: one for each of its engines."""
    asks = [Ask(each.turn, each.prompt, each.max_tokens, sampling=scene.sampling) for each in scene.requests]
    titles = [lane.title for lane in scene.lanes] or [scene.words.title]
    for title, settings, file in zip(titles, scene.engines, scene.files, strict=True):
        engine = config_fields(Settings().changed(settings))
        yield Take(file, title, engine, asks, scene.described(), is_measured=scene.name == MEASURED)


class Clock:
    """A time that passes only where it is told to, and a little with each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now = round(self.now + 20e-6, 9)
        return self.now


class TimedExecutor:
    """An executor whose steps take a made-up time."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        self._inner, self._clock, self._free_at = inner, clock, 0.0
        self.num_kv_blocks, self.graph_widths = inner.num_kv_blocks, getattr(inner, "graph_widths", ())
        self.shutdown, self.collective_rpc = inner.shutdown, inner.collective_rpc

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


@contextmanager
def measured_clock(engine: LLMEngine) -> Iterator[None]:
    """Let a warm engine on a CPU read how long this process has computed: what else the machine does counts for nothing."""
    engine.generate(["Once upon a time"] * 2, SamplingParams(max_tokens=8))
    with patch("time.monotonic", time.process_time) if engine.setup.device.type == "cpu" else nullcontext():
        yield


def play(take: Take, file: Path, device: str) -> None:
    """Record a take."""
    options: dict[str, Any] = {"device": device if take.is_measured else "cpu", "use_tqdm": False, "num_threads": 1}
    engine = make_engine(EngineConfig(**options | take.engine))
    clock = measured_clock if take.is_measured else virtual_clock
    about: dict[str, Any] = {} if take.is_measured else {"started": None}
    about |= {} if take.scene is None else {"scene": take.scene}
    with clock(engine), file.open("wb") as out, Recorder(engine, out.write, title=take.title, **about):
        turn = 0
        while turn <= max(ask.turn for ask in take.asks) or engine.has_unfinished_requests():
            for letter, ask in zip("abcdefghijklmnop", take.asks, strict=False):
                name = ask.name or letter
                if ask.turn == turn:
                    params = SamplingParams(**params_of(ask.sampling), max_tokens=ask.max_tokens, ignore_eos=True)
                    engine.add_request(name, ask.prompt, params, stream=False)
                if ask.until == turn:
                    engine.abort_request(name)
            engine.step()
            turn += 1
    engine.close()


def record(take: Take, file: Path, device: str) -> None:
    """Record a take; one whose times are measured so many times, and the fastest of them is kept."""
    for _ in range(REPEATS if take.is_measured else 1):
        play(take, other := file.with_name("other.jsonl"), device)
        if not file.exists() or seconds_of(other) < seconds_of(file):
            other.replace(file)


def seconds_of(file: Path) -> float:
    """How long a recording lasts."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[1:]]
    times: list[float] = [line[2] for line in lines if line[0] != "Texts"]
    return times[-1] - times[0]


def without_times(file: Path) -> list[Any]:
    """What happened: the lines of a recording with every time at 0. Times are its only fractions."""
    return [json.loads(line, parse_float=lambda _: 0) for line in file.read_text(encoding="utf-8").splitlines()]


def scores_in(events: list[Any]) -> npt.NDArray[np.float16]:
    """Take out of the lines of a recording what the model said of every token: in the last bits processors differ."""
    turns = [line[3] for line in events[1:] if line[0] == "Turn"]
    scored = [event for turn in turns for event in turn if event[0] == "Scored"]
    return np.frombuffer(b"".join(base64.b64decode(event.pop()) for event in scored), np.float16)


def are_alike(made: list[Any], kept: list[Any]) -> bool:
    """Whether two recordings, without times, say the same."""
    scores = scores_in(made), scores_in(kept)
    return made == kept and np.allclose(*scores, atol=0.05)


def main() -> None:
    """Write the recordings, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    parser.add_argument(
        "--measured", action="store_true", help="the recordings whose times are measured, and no others"
    )
    parser.add_argument("--device", default="cpu", help="for those: where the engine runs")
    wanted = parser.parse_args()
    of_scenes = [take for scene in scenes().values() for take in takes_of(scene)]
    # Sequences are numbered through all of them. Those with what the model said of every token come last.
    takes = TAKES + sorted(of_scenes, key=lambda take: any(ask.sampling for ask in take.asks))
    for take in takes:
        if take.is_measured == wanted.measured:
            with tempfile.TemporaryDirectory() as folder:
                record(take, made := Path(folder, "made.jsonl"), wanted.device)
                name = take.file.relative_to(ROOT)
                if not wanted.check:
                    take.file.parent.mkdir(parents=True, exist_ok=True)
                    take.file.write_bytes(made.read_bytes())
                elif not are_alike(without_times(made), without_times(take.file)):
                    sys.exit(f"{name}: the engine does something else by now. Look at it, then: make recordings")
                print(f"{name}: {made.stat().st_size} bytes")


if __name__ == "__main__":
    main()
