"""Ctrl-C between two steps of the engine, never inside one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """Yields what Ctrl-C sets, in place of an exception that would tear a step of the engine in two.

    A second Ctrl-C acts as it did before. Only the main thread hears signals; elsewhere the event is never set.
    """
    pressed, before = threading.Event(), signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield pressed
        return

    def press(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
