"""The engine under test: the reference in its own stage and in the last, or a learner's by FOLOVLLM_MINI."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from milestones.mini import harness
from milestones.mini.given.contract import Limits
from milestones.mini.harness import REFERENCE, Trace, play
from milestones.mini.ledger import Ask, Rejected
from milestones.running_example import example
from tests.helpers import assert_varied, hf_greedy, margins, prompts, tiny_checkpoint, tolerance

STORIES = Path(__file__).resolve().parents[2] / "folovllm/assets/stories-5m"
LAST = 6


@cache
def loaded(path: Path) -> ModuleType:
    """The adapters of an engine; it is loaded once, and again if another was loaded meanwhile."""
    return harness.load(path)


@cache
def answer(folder: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[list[int], int]:
    """The greedy answer of transformers, and how many of its first tokens are no close call (`tests/helpers.py`)."""
    tokens, logits = hf_greedy(folder, prompt, max_tokens)
    close = (margins(logits) <= 2 * tolerance(logits)).nonzero().flatten().tolist()
    return tokens, min([*close, max_tokens])


def asks_for(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], arrives: Sequence[int] = (), folder: Path | None = None
) -> list[Ask]:
    """Requests a, b, c, ... with the answers that they should get."""
    found = []
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        tokens, num_certain = answer(folder or tiny_checkpoint(), tuple(prompt), length)
        found.append(Ask(chr(ord("a") + i), tuple(prompt), tuple(tokens), arrives[i] if arrives else 0, num_certain))
    return found


def random_asks(sizes: Sequence[tuple[int, int]], arrives: Sequence[int] = (), seed: int = 0) -> list[Ask]:
    """Requests with random prompts: (tokens of the prompt, tokens of the answer)."""
    asks = asks_for(prompts([n for n, _ in sizes], seed), [n for _, n in sizes], arrives)
    if len(asks) > 1 and all(len(ask.answer) > 7 for ask in asks):
        assert_varied([ask.answer for ask in asks])
    return asks


def running_example(late: int = 0) -> list[Ask]:
    """A, B and C of the chapters, on the model of the course; C comes `late` steps after the others."""
    return [Ask(r.name, r.prompt_token_ids, r.answer_token_ids, late * (r.name == "C")) for r in example().requests]


def slots(max_seqs: int, length: int = 64) -> Limits:
    """Limits of stage 2: a block is as long as any text, and a step may compute all prompts."""
    return Limits(max_seqs, length, max_seqs, max_seqs * length)


@dataclass(frozen=True)
class Mini:
    """An engine under test, in a stage."""

    path: Path
    stage: int

    @property
    def adapters(self) -> ModuleType:
        if harness.loaded != self.path:
            loaded.cache_clear()
        return loaded(self.path)

    def play(self, asks: Sequence[Ask], limits: Limits = slots(4), folder: Path | None = None) -> Trace:  # noqa: B008 -- a value
        """Serve requests on the tiny model. A step that cannot be right fails the test by a sentence, and nothing else."""
        try:
            return play(self.adapters, folder or tiny_checkpoint(), Trace(limits, asks), self.stage)
        except Rejected as error:
            said = str(error)
        except NotImplementedError as error:
            said = f"not written yet: {error}"
        pytest.fail(said, pytrace=False)

    def beside(self, asks: Sequence[Ask], limits: Limits) -> tuple[Trace, Trace]:
        """What the engine and the reference, in the same stage, do with the same requests."""
        own = self.play(asks, limits)
        return own, Mini(REFERENCE, self.stage).play(asks, limits)


@cache
def reference(stage: int) -> Trace:
    """What the reference does with three requests in memory for two."""
    limits = slots(2) if stage < 3 else Limits(12, 4, 3, 64)
    return Mini(REFERENCE, stage).play(random_asks([(8, 16), (8, 16), (9, 8)], [0, 0, 3]), limits)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mini" not in metafunc.fixturenames:
        return
    found = re.search(r"stage(\d)", metafunc.module.__name__)
    own = int(found[1]) if found else LAST
    if folder := os.environ.get("FOLOVLLM_MINI"):
        stage = int(os.environ["FOLOVLLM_MINI_STAGE"])
        metafunc.parametrize("mini", [Mini(Path(folder), stage)], ids=["yours"])
    else:
        stages = sorted({own, LAST})
        metafunc.parametrize(
            "mini", [Mini(REFERENCE, stage) for stage in stages], ids=[f"reference-{s}" for s in stages]
        )
