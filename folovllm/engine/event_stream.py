"""Hands what happens in an engine (`folovllm.engine.events`) to whoever listens.

Without a listener no event is made: `if self.events.on: self.events.emit(BlockTaken(block_id))`.
"""

from __future__ import annotations

from collections.abc import Callable

from folovllm.engine.events import Event, Listener, Snapshot

Source = Callable[[], Event]  # `metrics.report_step` asks it; X4 has the only one, which counts experts


class Events:
    """One engine's stream. Events are collected while it works and handed over together, once a step."""

    __slots__ = ("_listeners", "_pending", "on", "sources")

    def __init__(self) -> None:
        self.on = False  # whether anybody listens
        self.sources: dict[Listener, Source] = {}  # X4: for some listeners, what makes an event before a step ends
        self._listeners: list[Listener] = []
        self._pending: list[Event] = []

    def subscribe(self, listener: Listener, snapshot: Snapshot) -> None:
        """Let `listener` hear of all from here on; first, how things stand."""
        self.drain()
        listener([snapshot])
        self._listeners.append(listener)
        self.on = True

    def unsubscribe(self, listener: Listener) -> None:
        """Hand over what has happened, and tell `listener` nothing more. ValueError if it does not listen."""
        self.drain()
        self._listeners.remove(listener)
        self.sources.pop(listener, None)
        self.on = bool(self._listeners)

    def emit(self, event: Event) -> None:
        """Note what happened."""
        self._pending.append(event)

    def drain(self) -> None:
        """Hand over what has happened since the last time, in its order."""
        if self._pending:
            events, self._pending = self._pending, []
            for listener in list(self._listeners):
                listener(events)
