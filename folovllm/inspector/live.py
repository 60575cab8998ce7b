"""The live view of an engine: what it does is collected beside it, and handed to each reader."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from folovllm.inspector.lines import TokenTexts

if TYPE_CHECKING:
    from folovllm.inspector.recorder import Engine, Recorder

PERIOD = 1 / 15  # seconds between two messages
MOST_UNREAD = 8 << 20  # bytes that wait for one reader
KEEP_ALIVE = 15.0  # seconds of silence after which a reader is told that we are still there


class LiveLines:
    """Beside the engine: the lines of what it does while it has readers, in pieces.

    A piece that begins with a header is a beginning, where readers join; the others continue what came before. A reader of
    a stream never goes back, so no keyframe follows a beginning: of an engine with 66,000 blocks one has three megabytes.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._recorder: Recorder | None = None
        self._texts: TokenTexts | None = None  # made for the first reader
        self._pieces: list[bytearray] = []
        self._lock = threading.Lock()
        self._taken_at = clock()

    def begin(self) -> None:
        """Begin, or begin anew: a reader joins."""
        from folovllm.inspector.recorder import Recorder

        if self._recorder is None:
            self._texts = TokenTexts(self._engine.tokenizer) if self._texts is None else self._texts
            self._recorder = Recorder(self._engine, self._add, title="live", key_every=0, texts=self._texts)
        else:
            self._recorder.begin_again()

    def end(self, how: str) -> list[bytes]:
        """Nobody looks any more, or the engine ends; returns what is left."""
        if self._recorder is None:
            return []
        self._recorder.close(how)
        self._recorder = None
        return self._pop()

    def take(self, all_of_it: bool) -> list[bytes]:
        """The pieces since the last time, if that is long enough ago; at once with `all_of_it`, for nothing comes soon."""
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


def is_beginning(piece: bytes | bytearray) -> bool:
    """Whether a piece begins with a header."""
    return piece[:1] == b"{"


class Reader:
    """One who looks, and what waits to be read. Who does not keep up begins anew, and holds no more than `MOST_UNREAD`."""

    def __init__(self) -> None:
        self.joins = True  # until a beginning comes
        self.is_lost = self.is_over = False
        self.news = asyncio.Event()
        self._unread: deque[bytes] = deque()
        self._size = 0

    @property
    def has_unread(self) -> bool:
        """Whether `read` would return something."""
        return bool(self._unread)

    def feed(self, piece: bytes) -> None:
        """Keep a piece for the reader, if it can do anything with it."""
        if self.is_lost or self.joins != is_beginning(piece):
            return
        self.joins = False
        self._unread.append(piece)
        self._size += len(piece)
        if self._size > MOST_UNREAD and len(self._unread) > 1:  # a beginning alone is as long as it must be
            self._unread.clear()
            self._size, self.is_lost = 0, True
        self.news.set()

    def read(self) -> bytes:
        """What came since the last time."""
        self.news.clear()
        data = b"".join(self._unread)
        self._unread.clear()
        self._size = 0
        return data


class Audience:
    """All who look at one engine after the other. The engine tells something only while there is anybody."""

    def __init__(self, watch: Callable[[bool], None]) -> None:
        """`watch` is the engine's: True asks for a beginning and what comes after, False for nothing more."""
        self._watch = watch
        self._readers: set[Reader] = set()

    def __len__(self) -> int:
        return len(self._readers)

    def take_in(self, pieces: list[bytes]) -> None:
        """Give everybody what the engine said."""
        for piece in pieces:
            for reader in self._readers:
                reader.feed(piece)

    def begin_anew(self) -> None:
        """There is another engine: everybody begins anew."""
        for reader in self._readers:
            reader.joins, reader.is_lost = True, False
        if self._readers:
            self._watch(True)

    def join(self) -> Reader:
        """A new reader. The caller must end it with `leave`."""
        reader = Reader()
        self._readers.add(reader)
        self._watch(True)
        return reader

    def leave(self, reader: Reader) -> None:
        """End a reader. A second call does nothing."""
        if reader in self._readers:
            self._readers.discard(reader)
            if not self._readers:
                self._watch(False)

    def close(self) -> None:
        """Nothing more comes: streams end once what there is was read."""
        for reader in self._readers:
            reader.is_over = True
            reader.news.set()

    async def events(self, reader: Reader) -> AsyncIterator[bytes]:
        """Server-sent events for a reader."""
        while not reader.is_over or reader.has_unread:
            try:
                async with asyncio.timeout(KEEP_ALIVE):
                    await reader.news.wait()
            except TimeoutError:
                yield b": still there\n\n"
                continue
            if data := reader.read():
                yield as_event(data)
            if reader.is_lost:
                reader.joins, reader.is_lost = True, False
                self._watch(True)


def as_event(data: bytes) -> bytes:
    """Lines as one server-sent event."""
    return b"data: " + data.rstrip(b"\n").replace(b"\n", b"\ndata: ") + b"\n\n"
