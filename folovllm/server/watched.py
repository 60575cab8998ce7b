"""Between the engine's loop and its link: the commands of those who watch the engine, of which the loop knows nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from folovllm.config import EngineConfig
from folovllm.events import Listener
from folovllm.inspector import recorder
from folovllm.inspector.live import LiveLines
from folovllm.sampling_params import SamplingParams
from folovllm.server import engine_loop as server
from folovllm.server.messages import (
    AskExperts,
    Command,
    ExpertLoad,
    Failure,
    News,
    Pace,
    Refused,
    Seen,
    Stop,
    Watch,
    Work,
)


class Watchable(server.Engine, recorder.Engine, Protocol):
    """What is asked of an engine that is served and watched: `LLMEngine` has it."""

    def prepare_forms(self) -> None:
        """Prepare for answers with a form: the first one would hold up the others for a second."""

    def expert_load(self) -> list[list[int]]:
        """How often each expert of each layer was asked, [L][E]."""


MakeWatchable = Callable[[EngineConfig], Watchable]


class PacedEngine:
    """An engine that waits between steps, or takes none, as those who watch it ask."""

    def __init__(self, engine: Watchable) -> None:
        self._engine = engine
        self.setup = engine.setup
        self._pace = Pace()
        self._steps_left = 0  # while it is held

    def set(self, pace: Pace) -> None:
        """Go at another pace from here on."""
        self._steps_left = self._steps_left + pace.step if pace.is_held else 0
        self._pace = pace

    @property
    def is_slow(self) -> bool:
        """Whether a reader can see each step."""
        return self._pace.is_held or self._pace.delay > 0

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work, and may do it."""
        return not (self._pace.is_held and self._steps_left == 0) and self._engine.has_unfinished_requests()

    def step(self) -> None:
        """Compute, unless it is held."""
        if not self.has_unfinished_requests():
            self._engine.abort_request([])  # ends none, and lets listeners hear of new requests while it is held
            return
        self._steps_left -= self._pace.is_held
        self._engine.step()
        if not self._pace.is_held:
            time.sleep(self._pace.delay)

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **extra: Any) -> None:
        """As the engine has it."""
        self._engine.add_request(request_id, prompt, params, **extra)

    def abort_request(self, request_id: Iterable[str]) -> None:
        """As the engine has it."""
        self._engine.abort_request(request_id)

    def subscribe(self, listener: Listener) -> None:
        """As the engine has it."""
        self._engine.subscribe(listener)

    def expert_load(self) -> list[list[int]]:
        """As the engine has it."""
        return self._engine.expert_load()

    def close(self) -> None:
        """As the engine has it."""
        self._engine.close()


class Link(Protocol):
    """The engine's end of a transport, with all that may come through it."""

    def receive(self, wait: bool) -> Sequence[Command | Refused]:
        """What has arrived, in order; with `wait` at least one."""

    def send(self, news: News) -> None:
        """Say something."""


class WatchedLink:
    """A link that keeps the commands of those who watch from the loop, and carries them out between two turns."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._engine: PacedEngine | None = None  # once it is made
        self._live: LiveLines | None = None

    def making(self, make_engine: MakeWatchable) -> Callable[[EngineConfig], PacedEngine]:
        """Wrap `make_engine`: its engine can be watched through this link."""

        def make(config: EngineConfig) -> PacedEngine:
            engine = make_engine(config)
            engine.prepare_forms()
            self._engine, self._live = PacedEngine(engine), LiveLines(engine)
            return self._engine

        return make

    def receive(self, wait: bool) -> list[Work]:
        """As the loop's link has it; but the list may be empty with `wait` too, if no command was for the loop."""
        if self._live is None or self._engine is None:
            return [command for command in self._link.receive(wait) if isinstance(command, Work)]
        self._tell(self._live.take(all_of_it=wait or self._engine.is_slow))
        commands = self._link.receive(wait)
        left: list[Work] = []
        for command in commands:
            if isinstance(command, Watch):
                self._watch(command.is_on)
            elif isinstance(command, Pace):
                self._engine.set(command)
            elif isinstance(command, AskExperts):
                self._link.send(ExpertLoad(self._engine.expert_load()))
            else:
                left.append(command)
        if any(isinstance(command, Stop) for command in left):
            self._tell(self._live.end("closed"))
        return left

    def send(self, news: News) -> None:
        """As `Link` has it; before a failure, the last that was seen."""
        if isinstance(news, Failure) and self._live is not None:
            self._tell(self._live.end(news.message))
        self._link.send(news)

    def _watch(self, is_on: bool) -> None:
        assert self._live is not None
        if is_on:
            self._live.begin()
        else:
            self._tell(self._live.end("closed"))

    def _tell(self, pieces: list[bytes]) -> None:
        if pieces:
            self._link.send(Seen(pieces))
