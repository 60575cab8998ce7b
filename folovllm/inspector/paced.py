"""The live view of an engine, on the engine's side: the lines of what it does, and how fast it may go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from folovllm.engine.llm_engine import LLMEngine
from folovllm.inspector.lines import TokenTexts
from folovllm.inspector.live import is_beginning
from folovllm.inspector.recorder import Recorder
from folovllm.plugins import named
from folovllm.server import messages as msg

PERIOD = 1 / 15  # seconds between two messages


class LiveLines:
    """Beside the engine: the lines of what it does while it has subscribers, in pieces.

    A piece that begins with a header is a beginning, where subscribers join; the others continue what came before.
    """

    def __init__(self, engine: LLMEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._recorder: Recorder | None = None
        self._texts: TokenTexts | None = None  # made for the first subscriber
        self._pieces: list[bytearray] = []
        self._lock = threading.Lock()
        self._taken_at = clock()

    def begin(self) -> None:
        """Begin, or begin anew: a subscriber joins."""
        if self._recorder is None:
            self._texts = TokenTexts(self._engine.tokenizer) if self._texts is None else self._texts
            self._recorder = Recorder(self._engine, self._add, title="live", texts=self._texts)
        else:
            self._recorder.begin_again()

    def end(self, how: str) -> list[bytes]:
        """End, since the last subscriber left or the engine ends. Returns the pieces that are left."""
        if self._recorder is None:
            return []
        self._recorder.close(how)
        self._recorder = None
        return self._pop()

    def take(self, all_of_it: bool) -> list[bytes]:
        """The pieces since the last time, none before `PERIOD` has passed. With `all_of_it` at once, as nothing comes soon."""
        if self._recorder is None:
            return []
        now = self._clock()
        if all_of_it:
            self._recorder.wait()
        elif now - self._taken_at < PERIOD:
            return []
        self._taken_at = now
        return self._pop()

    def _pop(self) -> list[bytes]:
        with self._lock:
            pieces, self._pieces = self._pieces, []
        return [bytes(piece) for piece in pieces]

    def _add(self, data: bytes) -> None:
        """In the recorder's thread."""
        with self._lock:
            if self._pieces and not is_beginning(data) and not is_beginning(self._pieces[-1]):
                self._pieces[-1] += data
            else:
                self._pieces.append(bytearray(data))


class PacedEngine:
    """An engine that waits between steps, or takes none, as those who watch it ask. All else is the engine's own.

    Attributes:
        live: what they see of it.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine, self.live = engine, LiveLines(engine)
        self._pace = msg.Pace()
        self._steps_left = 0  # while it is held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def set(self, pace: msg.Pace) -> None:
        """Go at another pace from here on."""
        self._steps_left = self._steps_left + pace.step if pace.is_held else 0
        self._pace = pace

    def call(self, call: msg.Call) -> msg.Called:
        """Call a function of an elective with the engine itself."""
        try:
            return msg.Called(named(call.place)(self._engine, call.query))
        except ValueError as error:
            return msg.Called(error=str(error))

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
