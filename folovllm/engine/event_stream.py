"""Hands what happens in an engine (`folovllm.engine.events`) to whoever listens.

Without a listener no event is made: `if self.events.on: self.events.emit(BlockTaken(block_id))`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from folovllm.engine.events import Event, Listener, Snapshot

Source = Callable[[], Event]  # `metrics.report_step` asks it; X4 has the only one, which counts experts
logger = logging.getLogger("folovllm")


class Events:
    """One engine's stream. Events are collected while it works and handed over together, once a step.

    A listener that raises is told nothing more; the log has its traceback, and the engine's step goes on.
    """

    __slots__ = ("_failed", "_listeners", "_pending", "on", "sources")

    def __init__(self) -> None:
        self.on = False  # whether anybody listens
        self.sources: list[Source] = []  # each makes an event before a step ends
        self._listeners: list[tuple[Listener, Source | None]] = []
        self._failed: list[Listener] = []  # until they unsubscribe
        self._pending: list[Event] = []

    def subscribe(self, listener: Listener, snapshot: Snapshot, source: Source | None = None) -> None:
        """Let `listener` hear of all from here on; first, how things stand. `source` makes an event for it, once a step."""
        self.drain()
        listener([snapshot])
        self._update([*self._listeners, (listener, source)])

    def unsubscribe(self, listener: Listener) -> None:
        """Hand over what has happened, and tell `listener` nothing more. ValueError if it does not listen."""
        self.drain()
        if listener in self._failed:
            self._failed.remove(listener)
        else:
            at = [other for other, _ in self._listeners].index(listener)
            self._update([*self._listeners[:at], *self._listeners[at + 1 :]])

    def emit(self, event: Event) -> None:
        """Note what happened."""
        self._pending.append(event)

    def drain(self) -> None:
        """Hand over what has happened since the last time, in its order."""
        if self._pending:
            events, self._pending = self._pending, []
            for listener, source in self._listeners:
                try:
                    listener(events)
                except Exception:
                    logger.exception("a listener to the engine's events failed; it is told nothing more")
                    self._failed.append(listener)
                    self._update([pair for pair in self._listeners if pair != (listener, source)])

    def _update(self, listeners: list[tuple[Listener, Source | None]]) -> None:
        self._listeners, self.on = listeners, bool(listeners)
        self.sources = list(dict.fromkeys(source for _, source in listeners if source is not None))
