"""The live view of an engine, on the engine's side: the lines of what it does, and how fast it may go."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from folovllm.apps.inspector.recorder import Recorder, TokenTexts
from folovllm.engine.llm_engine import LLMEngine
from folovllm.plugins import named

PERIOD = 1 / 15  # seconds between two messages


class PacedEngine:
    """An engine that waits between steps, or takes none, as those who watch it ask. All else is the engine's own.

    While somebody watches it makes lines of what it does, a piece a turn. A piece that begins with a header is a beginning, where
    subscribers join; the others continue what came before.
    """

    def __init__(self, engine: LLMEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._recorder: Recorder | None = None
        self._texts: TokenTexts | None = None  # made for the first subscriber
        self._pieces: deque[bytes] = deque()  # which the recorder's thread appends
        self._taken_at = clock()
        self._delay, self._is_held = 0.0, False
        self._steps_left = 0  # while it is held

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def watch(self, is_on: bool) -> None:
        """Begin a recording, or begin it anew, as a subscriber joins; or end it."""
        if not is_on:
            self.end_recording("closed")
        elif self._recorder is not None:
            self._recorder.begin_again()
        else:
            self._texts = self._texts or TokenTexts(self._engine.tokenizer)
            self._recorder = Recorder(self._engine, self._pieces.append, title="live", texts=self._texts)

    def end_recording(self, how: str) -> list[bytes]:
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
        return [self._pieces.popleft() for _ in range(len(self._pieces))]

    def set_pace(self, delay: float = 0.0, is_held: bool = False, steps: int = 0) -> None:
        """Wait `delay` seconds between steps from here on; held, take `steps` more steps alone."""
        self._steps_left = self._steps_left + steps if is_held else 0
        self._delay, self._is_held = delay, is_held

    def call_function(self, function: str, query: dict[str, list[str]]) -> Any:
        """Return what an elective's function ("module:name") returns for the engine itself and a query."""
        return named(function)(self._engine, query)

    @property
    def is_slow(self) -> bool:
        """Whether a reader can see each step."""
        return self._is_held or self._delay > 0

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work, and may do it."""
        return not (self._is_held and self._steps_left == 0) and self._engine.has_unfinished_requests()

    def step(self) -> None:
        """Compute, unless it is held."""
        if not self.has_unfinished_requests():
            self._engine.abort_request([])  # ends none, and lets listeners hear of new requests while it is held
            return
        self._steps_left -= self._is_held
        self._engine.step()
        if not self._is_held:
            time.sleep(self._delay)
