"""An engine that goes as slowly as somebody wants to watch: around its link and its steps, so that others pay nothing."""

from __future__ import annotations

import time
from typing import Any, cast

from folovllm.config import EngineConfig
from folovllm.server.engine_loop import Engine, Link, MakeEngine
from folovllm.server.messages import Command, News, Pace, PacedCommand


def paced(link: Link, make_engine: MakeEngine) -> tuple[Link, MakeEngine]:
    """The same with `Pace` among its commands, for `run_engine`."""
    paced_link = PacedLink(link)

    def make(config: EngineConfig) -> Engine:
        return cast(Engine, PacedEngine(make_engine(config), paced_link))

    return paced_link, make


class PacedLink:
    """Takes `Pace` out of what arrives, and knows how fast to go."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.delay = 0.0  # seconds between two steps
        self.steps_left: int | None = None  # while it is held; None: it is not

    def receive(self, wait: bool) -> list[Command]:
        """As `Link` has it; with `wait` nothing, perhaps, if all that came was another pace."""
        others: list[Command] = []
        for command in cast("list[PacedCommand]", self._link.receive(wait)):
            if isinstance(command, Pace):
                self.delay = command.delay
                self.steps_left = (self.steps_left or 0) + command.step if command.is_held else None
            else:
                others.append(command)
        return others

    def send(self, news: News) -> None:
        """As `Link` has it."""
        self._link.send(news)


class PacedEngine:
    """An engine that rests after each step. Held, it seems to have nothing to do."""

    def __init__(self, engine: Engine, pace: PacedLink) -> None:
        self._engine, self._pace = engine, pace

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def has_unfinished_requests(self) -> bool:
        """As the engine, while it may step."""
        return self._pace.steps_left != 0 and self._engine.has_unfinished_requests()

    def step(self) -> object:
        """As the engine, and a rest. Who comes while it is held is told all the same."""
        if not self.has_unfinished_requests():
            return self._engine.abort_request([])  # ends nobody, and tells what has come
        done = self._engine.step()
        if self._pace.steps_left is not None:
            self._pace.steps_left -= 1
        else:
            time.sleep(self._pace.delay)
        return done
