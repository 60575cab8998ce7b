"""Ctrl-C between two steps of the engine, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, in place of an exception that would tear a step of the engine in two.

    A second Ctrl-C acts as ever, for whoever waits for a step that does not end. Only the main thread hears signals; in
    others, and where Ctrl-C is ignored, the event is never set.
    """
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield event
        return

    def note(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
