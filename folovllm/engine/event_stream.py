"""Hands what happens in an engine (`folovllm.engine.events`) to whoever listens.

Without a listener no event is made, and each place that could make one reads one attribute:

    if self.events.on:
        self.events.emit(BlockTaken(block_id))
"""

from __future__ import annotations

import logging

from folovllm.engine.events import Event, Listener, Snapshot

logger = logging.getLogger("folovllm")


class Events:
    """One engine's stream. Events are collected while it works and handed over together, once a step.

    A listener that fails disturbs neither the engine's step nor the other listeners. The log has
    its traceback, and it is told nothing more.
    """

    __slots__ = ("_failed", "_listeners", "_pending", "_wanting_experts", "on", "wants_experts")

    def __init__(self) -> None:
        self.on = False  # whether anybody listens
        self.wants_experts = False  # whether anybody wants `ExpertsAsked`
        self._listeners: list[Listener] = []
        self._wanting_experts: list[Listener] = []
        self._failed: list[Listener] = []  # until they unsubscribe
        self._pending: list[Event] = []

    def subscribe(self, listener: Listener, snapshot: Snapshot, experts: bool = False) -> None:
        """Let `listener` hear of all that happens from here on; first, how things stand. With `experts` there is `ExpertsAsked`."""
        self.drain()
        listener([snapshot])
        self._listeners.append(listener)
        if experts:
            self._wanting_experts.append(listener)
        self._note_listeners()

    def unsubscribe(self, listener: Listener) -> None:
        """Hand over what has happened, and tell `listener` nothing more. ValueError if it does not listen."""
        self.drain()
        (self._failed if listener in self._failed else self._listeners).remove(listener)
        self._wanting_experts = [other for other in self._wanting_experts if other != listener]
        self._note_listeners()

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
            self._note_listeners()

    def _note_listeners(self) -> None:
        self.on = bool(self._listeners)
        self.wants_experts = any(listener in self._listeners for listener in self._wanting_experts)
