"""What an engine of mini is worth: counts, which are the same on every machine, and a history of them."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from milestones.mini import harness
from milestones.mini.film import recording
from milestones.mini.given.contract import Limits
from milestones.mini.harness import REFERENCE, Trace, play
from milestones.mini.ledger import Ask

STORIES = harness.HERE.parents[1] / "folovllm/assets/stories-5m"
BEGINNING = "Once upon a time, there was a little girl named Lily. She had a red ball and a small dog. "
PROMPTS = (
    "",
    "One day,",
    "The dog",
    "She went to the park with her mom.",
    "Lily saw a bird.",
    "The dog ran away. Lily was sad.",
)
LENGTHS = (24, 8, 30, 16, 12, 20)
NUM_BLOCKS, BLOCK_SIZE = 16, 8  # memory for two of the longest


def limits(stage: int) -> Limits:
    """What an engine may use for the score: as much memory in slots as in blocks."""
    longest = 64
    if stage == 2:
        return Limits(NUM_BLOCKS * BLOCK_SIZE // longest, longest, NUM_BLOCKS * BLOCK_SIZE // longest, 256)
    return Limits(NUM_BLOCKS, BLOCK_SIZE, 6, 256 if stage < 5 else 32)


@cache
def workload(arrives: int = 2) -> tuple[Ask, ...]:
    """Six requests for the model of the course, most with one beginning; the reference's answers are the right ones."""
    encode = tokenizer().encode
    prompts = [encode(BEGINNING * (i % 3 != 2) + prompt or BEGINNING).ids for i, prompt in enumerate(PROMPTS)]
    asks = [Ask(chr(ord("a") + i), tuple(ids), (0,) * LENGTHS[i], arrives * i) for i, ids in enumerate(prompts)]
    trace = play(harness.load(REFERENCE), STORIES, Trace(limits(6), asks), 6, is_checked=False)
    answers = {ask.id: tuple(s.tokens[ask.id] for s in trace.steps if ask.id in s.tokens) for ask in asks}
    return tuple(Ask(ask.id, ask.prompt, answers[ask.id], ask.arrives) for ask in asks)


@cache
def tokenizer() -> Any:
    """The tokenizer of the model of the course."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(STORIES / "tokenizer.json"))


def recording_of(trace: Trace, stage: int) -> str:
    """The recording of an engine that served the workload, as a file's text."""
    said = {id for step in trace.steps for id in step.tokens.values()}
    ids = said.union(*(ask.prompt for ask in trace.asks)) & {*range(tokenizer().get_vocab_size())}
    texts = {id: tokenizer().decode([id], skip_special_tokens=False) for id in sorted(ids)}
    return recording(trace, "mini", "stories-5m", texts, stage)


def counts(stage: int) -> dict[str, int]:
    """What the reference does with the workload in this stage, as counts."""
    return play(harness.load(REFERENCE), STORIES, Trace(limits(stage), workload()), stage).counts


def speed(path: Path, stage: int) -> float:
    """Generated tokens a second of the engine in `path` on this machine, the best of three."""
    asks, threads, adapters = workload(0), torch.get_num_threads(), harness.load(path)
    torch.set_num_threads(threads)  # whatever an engine does about that when it is loaded
    traces = [play(adapters, STORIES, Trace(limits(stage), asks), stage, is_checked=False) for _ in range(3)]
    return _num_answered(asks) / min(trace.times[-1][1] - trace.times[0][0] for trace in traces)


def speeds(stage: int, tell: Callable[[str], None] = lambda whose: None) -> dict[str, float]:
    """The speeds of the reference, of the real engine, and of transformers. `tell` is called with whose turn it is.

    torch has as many threads as it has now, whatever an engine does about that.
    """
    asks, threads = workload(0), torch.get_num_threads()
    turns: dict[str, Callable[[], float]] = {
        "the reference": lambda: speed(REFERENCE, stage),
        "FoloVLLM": lambda: _num_answered(asks) / _seconds_of_the_engine(asks),
        "transformers": lambda: speed(REFERENCE, 0),
    }
    found = {}
    for whose, measured in turns.items():
        tell(whose)
        torch.set_num_threads(threads)
        found[whose] = measured()
    return found


def _num_answered(asks: Sequence[Ask]) -> int:
    return sum(ask.max_tokens for ask in asks)


def _seconds_of_the_engine(asks: Sequence[Ask]) -> float:
    from folovllm import LLM, SamplingParams

    prompts = [list(ask.prompt) for ask in asks]
    params = [SamplingParams(temperature=0, max_tokens=ask.max_tokens, ignore_eos=True) for ask in asks]
    seconds = []
    with LLM(str(STORIES), dtype="float32", max_model_len=128) as llm:
        for _ in range(3):
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def remember(file: Path, stage: int, counts: dict[str, int], speed: float | None) -> list[dict[str, Any]]:
    """Append a score to the history in `file`. Returns all of it, oldest first."""
    history: list[dict[str, Any]] = json.loads(file.read_text()) if file.is_file() else []
    day = datetime.date.today().isoformat()
    history.append({"day": day, "stage": stage, "counts": counts, "tokens a second": speed})
    file.write_text(json.dumps(history, indent=1))
    return history
