"""The live view of an engine, on the server's side: each subscriber gets the lines of what the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

MOST_UNREAD = 8 << 20  # bytes that wait for one subscriber
KEEP_ALIVE = 15.0  # seconds of silence after which a comment keeps a stream open


def is_beginning(piece: bytes) -> bool:
    """Whether a piece begins with a header."""
    return piece[:1] == b"{"


class Subscriber:
    """A stream, and the bytes that wait for it: a beginning, and at most `MOST_UNREAD` more. One that does not keep up begins anew."""

    def __init__(self) -> None:
        self.joins = True  # until a beginning comes
        self.is_lost = False  # until it reads again, and asks for a beginning
        self.changed = asyncio.Event()
        self.unread, self.most = bytearray(), 0

    def put(self, piece: bytes) -> None:
        """Keep a piece for the stream, if it can do anything with it."""
        if self.joins != is_beginning(piece):
            return
        if self.joins:
            self.most = len(piece) + MOST_UNREAD  # a beginning is as long as it must be
        self.joins = False
        self.unread += piece
        if len(self.unread) > self.most:
            self.unread.clear()
            self.joins = self.is_lost = True
        self.changed.set()

    def read(self) -> bytes:
        """What came since the last time."""
        self.changed.clear()
        data, self.unread = bytes(self.unread), bytearray()
        return data


class Subscribers:
    """All streams of one engine after the other. The engine makes lines only while there are any."""

    def __init__(self, watch: Callable[[bool], None]) -> None:
        """`watch` is the engine's: True asks for a beginning and what comes after, False for nothing more."""
        self._watch = watch
        self._all: set[Subscriber] = set()
        self._is_over = False

    def publish(self, pieces: list[bytes]) -> None:
        """Give everybody the lines that the engine made."""
        for subscriber in self._all:
            for piece in pieces:
                subscriber.put(piece)

    def begin_anew(self) -> None:
        """There is another engine: every stream begins anew."""
        for subscriber in self._all:
            subscriber.joins, subscriber.is_lost = True, False
        if self._all:
            self._watch(True)

    def add(self) -> Subscriber:
        """A new subscriber. The caller must end it with `remove`."""
        self._all.add(subscriber := Subscriber())
        self._watch(True)
        return subscriber

    def remove(self, subscriber: Subscriber) -> None:
        """End a subscriber. A second call does nothing."""
        if subscriber in self._all:
            self._all.discard(subscriber)
            if not self._all:
                self._watch(False)

    def close(self) -> None:
        """Nothing more comes: streams end once all is read."""
        self._is_over = True
        for subscriber in self._all:
            subscriber.changed.set()

    async def events(self, subscriber: Subscriber) -> AsyncIterator[bytes]:
        """Yield what waits for a subscriber as server-sent events, until `close`. The caller calls `remove`."""
        while not self._is_over or subscriber.unread:
            try:
                await asyncio.wait_for(subscriber.changed.wait(), KEEP_ALIVE)
            except TimeoutError:
                yield b": still there\n\n"
            if data := subscriber.read():
                yield as_event(data)
            if subscriber.is_lost:
                subscriber.is_lost = False
                self._watch(True)


def as_event(data: bytes) -> bytes:
    """Lines as one server-sent event."""
    return b"data: " + data.rstrip(b"\n").replace(b"\n", b"\ndata: ") + b"\n\n"
