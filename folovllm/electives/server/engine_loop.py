"""The loop around an engine that others feed: take in what arrived, step, hand out what is new, one message a step."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Protocol

from folovllm.config import EngineConfig
from folovllm.electives.server.aggregator import Aggregator
from folovllm.electives.server.messages import Abort, Add, EngineMessage, Failure, Ready, Refused, Step, Stop, Work
from folovllm.engine.events import Event
from folovllm.engine.llm_engine import LLMEngine
from folovllm.executor.messages import plain

logger = logging.getLogger("folovllm")
MakeEngine = Callable[[EngineConfig], LLMEngine]


class Link(Protocol):
    """The engine's end of a transport."""

    def receive(self, wait: bool) -> list[Work]:
        """What has arrived, in order; with `wait` at least one. `Stop` where nobody is left at the other end."""

    def send(self, message: EngineMessage) -> None:
        """Say something."""


def run_engine(config: EngineConfig, link: Link, make_engine: MakeEngine) -> bool:
    """Build an engine and step it until it is told to stop; both in the thread that calls this, which is torch's own.

    Once the engine is there the link hears `Ready(pickle.dumps(plain(engine.setup)), n)`, with the number of KV blocks that
    `loop.outputs().stats` has as `kv_blocks_total`. Then an `EngineLoop` turns until a turn returns False.

    Any exception ends it, and is the last that the link hears, as a `Failure`. A ValueError while the engine is built is the
    user's error: its sentence alone is the message. Any other is "TypeName: sentence", and `logger.exception` notes where it
    came from. The engine, if there is one, is closed whatever happened.

    Returns:
        Whether nothing went wrong.
    """
    engine = None
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.outputs().stats.kv_blocks_total))
        while loop.turn():
            pass
        return True
    except Exception as error:
        is_user_error = engine is None and isinstance(error, ValueError)
        if not is_user_error:
            logger.exception("the engine has ended")
        link.send(Failure(str(error) if is_user_error else f"{type(error).__name__}: {error}", is_user_error))
        return False
    finally:
        if engine is not None:
            engine.close()


class EngineLoop:
    """Runs an engine, which is idle at the start, for the other end of a link.

    It reads the engine's events. So the engine makes no `RequestOutput` for each token, and is not asked for its state.
    """

    def __init__(self, engine: LLMEngine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._events: list[Event] = []  # since the last message
        self._aggregator = Aggregator(bool(engine.setup.config.enable_prefix_caching))
        engine.subscribe(self._events.extend)

    def turn(self) -> bool:
        """One turn: all that has arrived, then a step, then one message.

        `self._link.receive(wait=...)` gives the commands that have arrived, in order. It waits for one only where the engine
        has no work (`has_unfinished_requests`): so an idle engine takes no time, and one that works loses none. `Stop` ends
        the turn at once; an `Abort` goes to `abort_request([str(number)])`, an `Add` to `self.add`, which may refuse it.

        `self._engine.step()` takes the step. The message is `self.outputs(refused)`, one for each step, whatever was in it.

        Returns:
            False: it was told to stop.
        """
        refused: list[Refused] = []
        for command in self._link.receive(wait=not self._engine.has_unfinished_requests()):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self.add(command)) is not None:
                refused.append(refusal)
        self._engine.step()
        self._link.send(self.outputs(refused))
        return True

    def add(self, add: Add) -> Refused | None:
        """Queue a request. Returns the refusal if the engine raises ValueError: the request asks for what cannot be."""
        try:
            self._engine.add_checked(add.request)
        except ValueError as error:
            return Refused(add.number, str(error))
        return None

    def outputs(self, refused: list[Refused] | None = None) -> Step:
        """All that happened since the last time, as one message."""
        step = self._aggregator.take(self._events, refused or [])
        self._events.clear()
        return step
