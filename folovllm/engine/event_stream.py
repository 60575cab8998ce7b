"""Hands what happens in an engine (`folovllm.engine.events`) to whoever listens.

Without a listener no event is made, and each place that could make one reads one attribute:

    if self.events.on:
        self.events.emit(BlockTaken(block_id))
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from folovllm.engine.events import Event, Listener, Snapshot

Source = Callable[[], Event]
logger = logging.getLogger("folovllm")


class Events:
    """One engine's stream. Events are collected while it works and handed over together, once a step.

    A listener that fails disturbs neither the engine's step nor the other listeners. The log has
    its traceback, and it is told nothing more.
    """

    __slots__ = ("_failed", "_listeners", "_pending", "_sources", "on", "sources")

    def __init__(self) -> None:
        self.on = False  # whether anybody listens
        self.sources: list[Source] = []  # each makes an event before a step ends
        self._listeners: list[Listener] = []
        self._sources: list[tuple[Listener, Source]] = []  # and who asked for it
        self._failed: list[Listener] = []  # until they unsubscribe
        self._pending: list[Event] = []

    def subscribe(self, listener: Listener, snapshot: Snapshot, source: Source | None = None) -> None:
        """Let `listener` hear of all that happens from here on; first, how things stand. `source` makes an event for it, once a step."""
        self.drain()
        listener([snapshot])
        self._listeners.append(listener)
        if source is not None:
            self._sources.append((listener, source))
        self._update()

    def unsubscribe(self, listener: Listener) -> None:
        """Hand over what has happened, and tell `listener` nothing more. ValueError if it does not listen."""
        self.drain()
        (self._failed if listener in self._failed else self._listeners).remove(listener)
        self._sources = [(other, source) for other, source in self._sources if other != listener]
        self._update()

    def emit(self, event: Event) -> None:
        """Note what happened. Callers check first that there is a listener (`on`): else they make no event at all."""
        self._pending.append(event)

    def drain(self) -> None:
        """Hand over what has happened since the last time, in its order."""
        if self._pending:
            events, self._pending = self._pending, []
            for listener in tuple(self._listeners):
                try:
                    listener(events)
                except Exception:
                    logger.exception("a listener to the engine's events failed; it is told nothing more")
                    self._listeners.remove(listener)
                    self._failed.append(listener)
            self._update()

    def _update(self) -> None:
        self.on = bool(self._listeners)
        self.sources = list(dict.fromkeys(source for listener, source in self._sources if listener in self._listeners))
