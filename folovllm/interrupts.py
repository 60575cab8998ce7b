"""Ctrl-C between two steps of the engine, never inside one, and what had been answered by then."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from folovllm.outputs import RequestOutput


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while prompts were answered.

    Attributes:
        outputs: one entry for each prompt, in their order; None where there is no whole answer.
    """

    def __init__(self, outputs: list[RequestOutput | None]) -> None:
        count = sum(output is not None for output in outputs)
        super().__init__(f"interrupted: {count} of {len(outputs)} prompts are answered")
        self.outputs = outputs


class Answers:
    """The answers to a list of prompts: `take` gets them in the order of the prompts, each as soon as it can."""

    def __init__(self, ids: Sequence[str], take: Callable[[RequestOutput], object]) -> None:
        self._ids, self._take = ids, take
        self._found: dict[str, RequestOutput] = {}
        self._num_taken = 0

    def add(self, finished: Iterable[RequestOutput]) -> None:
        """Note what has finished, and hand on what waited only for that."""
        self._found |= {output.request_id: output for output in finished}
        while self._num_taken < len(self._ids) and self._ids[self._num_taken] in self._found:
            self._num_taken += 1
            self._take(self._found[self._ids[self._num_taken - 1]])

    def in_order(self) -> list[RequestOutput | None]:
        """An entry for each prompt; None where it is not answered."""
        return [self._found.get(request_id) for request_id in self._ids]


@contextmanager
def interrupts(then: Callable[[], object] = lambda: None) -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, in place of an exception that would tear a step of the engine in two.

    `then` is called when it is set, to end a wait for something else. A second Ctrl-C acts as it did before, so that it can
    end a step that hangs. Only the main thread hears signals; in others, and where Ctrl-C is ignored, the event is never set.
    """
    event = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield event
        return

    def note(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)
        then()

    signal.signal(signal.SIGINT, note)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)
