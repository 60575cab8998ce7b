"""Scenes: an engine, requests, what to watch, and a recording of each. `scenes.json` describes them all."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec

FOLDER = Path(__file__).parent


class Words(msgspec.Struct, frozen=True):
    """The words of a scene that a reader sees."""

    title: str
    watch: str  # what to look for
    question: str  # where the recording stops; the answer is what comes next


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
        words = {"words": self.words, "zh": self.zh}
        return {"name": self.name, "chapter": self.chapter, "start": self.start, "stop": self.stop} | words


@cache
def scenes() -> dict[str, Scene]:
    """All scenes by their names, in the order in which the page offers them."""
    data = (FOLDER / "scenes.json").read_bytes()
    return {scene.name: scene for scene in msgspec.json.decode(data, type=list[Scene])}
