"""The engine's end of a Unix socket."""

from __future__ import annotations

import pickle
import select
import socket
from collections import deque

from folovllm.build import make_engine
from folovllm.server.engine_loop import run_engine
from folovllm.server.messages import (
    NOT_SENT,
    Command,
    Failure,
    Frames,
    News,
    Refused,
    Stop,
    decode_command,
    encode,
    frame,
)
from folovllm.server.watched import MakeWatchable, WatchedLink

CHUNK = 1 << 20


def serve_socket(fd: int, make_engine: MakeWatchable = make_engine) -> bool:
    """Build the engine that the first message describes, and serve it. Returns whether it ended as it was told to."""
    connection = SocketLink(socket.socket(fileno=fd))
    try:
        config, link = pickle.loads(connection.first()), WatchedLink(connection)
    except (AttributeError, ImportError) as error:  # a class of the user's main program, say
        connection.send(Failure(f"{NOT_SENT} ({error})", True))
        return False
    return run_engine(config, link, link.making(make_engine))


class SocketLink:
    """Reads without waiting while the engine has work; writes until all is written."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = Frames()
        self._unread: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def first(self) -> bytes:
        """The first message: no command, but the configuration."""
        while not self._unread:
            self._read()
        return self._unread.popleft()

    def receive(self, wait: bool) -> list[Command | Refused]:
        """As `Link` has it."""
        while self._poll.poll(None if wait and not self._unread else 0):
            self._read()
        commands = [decode_command(message) for message in self._unread]
        self._unread.clear()
        return commands

    def _read(self) -> None:
        """Take in what is there; the end of the stream is a `Stop`."""
        data = self._socket.recv(CHUNK)
        self._unread.extend(self._frames.feed(data))
        if not data:
            self._poll.unregister(self._socket)
            self._unread.append(encode(Stop()))

    def send(self, news: News) -> None:
        """As `Link` has it."""
        self._socket.sendall(frame(encode(news)))
