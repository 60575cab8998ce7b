"""Scenes: an engine, requests, what to watch, and a recording of each. `scenes.json` describes them all."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent
VOCABULARY = 4096  # tokens of the embedded models


class Words(msgspec.Struct, frozen=True):
    """The words of a scene that a reader sees."""

    title: str
    watch: str  # what to look for
    question: str  # where the recording stops; the answer is what comes next


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are chosen: what the sliders of the scene *choose* set."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


class SceneRequest(msgspec.Struct, frozen=True):
    """A request, and the turn of the engine at which it comes."""

    turn: int
    prompt: str
    max_tokens: int


class Lane(msgspec.Struct, frozen=True):
    """One of several recordings that are shown side by side: what its settings change, in words and for the controls."""

    title: str
    settings: dict[str, Any]


class Scene(msgspec.Struct, frozen=True):
    """A scene.

    Attributes:
        chapter: of the book, that tells the whole story.
        start: the turn of the first lane from which the recording plays,
        stop: and the one at which it stops for the question.
        settings: of the playground's controls; others are at their defaults.
        requests: in the order in which they come.
        lanes: recordings that are shown side by side; one recording if there are none.
        sampling: where the tokens are chosen before the reader's eyes, how; else the engine is greedy.
    """

    name: str
    words: Words
    zh: Words
    chapter: str
    start: int
    stop: int
    settings: dict[str, Any]
    requests: tuple[SceneRequest, ...]
    lanes: tuple[Lane, ...] = ()
    sampling: Sampling | None = None

    @property
    def files(self) -> list[Path]:
        """Its recordings: one for each lane."""
        names = [f"{self.name}_{i}" for i in range(1, len(self.lanes) + 1)] or [self.name]
        return [FOLDER / f"{name}.jsonl" for name in names]

    @property
    def engines(self) -> list[dict[str, Any]]:
        """The settings of the engine of each recording."""
        return [self.settings | lane.settings for lane in self.lanes] or [self.settings]

    def described(self) -> dict[str, Any]:
        """What the page, and the header of a recording, say of it."""
        words = {"words": self.words, "zh": self.zh} | ({"sampling": self.sampling} if self.sampling else {})
        return {"name": self.name, "chapter": self.chapter, "start": self.start, "stop": self.stop} | words


def params_of(sampling: Sampling | None) -> dict[str, Any]:
    """The fields of `SamplingParams` for a scene's requests: with `sampling` the engine also says what it thought of every token."""
    return {"temperature": 0} if sampling is None else msgspec.structs.asdict(sampling) | {"logprobs": VOCABULARY}


@cache
def scenes() -> dict[str, Scene]:
    """All scenes by their names, in the order in which the page offers them."""
    data = (FOLDER / "scenes.json").read_bytes()
    return {scene.name: scene for scene in msgspec.json.decode(data, type=list[Scene])}
