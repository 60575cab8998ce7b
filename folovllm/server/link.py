"""The engine's end of a socket; and the commands of those who watch the engine, of which its loop knows nothing."""

from __future__ import annotations

import pickle
import select
import socket
from collections import deque
from typing import cast

from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.inspector.paced import PacedEngine
from folovllm.server import messages as msg
from folovllm.server.engine_loop import MakeEngine, run_engine

CHUNK = 1 << 20  # bytes that are read at once


class SocketLink:
    """Reads without waiting while the engine has work; writes until all is written.

    It carries out the commands of those who watch by itself, between two turns of the loop.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = msg.Frames()
        self._unread: deque[bytes] = deque()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._engine: PacedEngine | None = None  # once it is made

    def first(self) -> bytes:
        """The first message to a process: no command, but the configuration."""
        while not self._unread:
            self._read()
        return self._unread.popleft()

    def serve(self, config: EngineConfig, make_engine: MakeEngine) -> bool:
        """Build an engine that can be watched through this link, and serve it. Returns whether it ended as it was told to."""

        def make(config: EngineConfig) -> LLMEngine:
            engine = make_engine(config)
            engine.prepare_structured_outputs()
            return self.watched(engine)

        return run_engine(config, self, make)

    def watched(self, engine: LLMEngine) -> LLMEngine:
        """The engine, as those who watch it through this link have it paced."""
        self._engine = PacedEngine(engine)
        return cast(LLMEngine, self._engine)

    def receive(self, wait: bool) -> list[msg.Work]:
        """What has arrived for the loop, in order. With `wait` it waits for a command, which may be for this link alone."""
        if self._engine is not None:
            self._tell(self._engine.live.take(all_of_it=wait or self._engine.is_slow))
        while self._poll.poll(None if wait and not self._unread else 0):
            self._read()
        work: list[msg.Work] = []
        for command in map(msg.decode_command, self._unread):
            if isinstance(command, msg.Work):
                work.append(command)
            else:
                self._carry_out(command)
        self._unread.clear()
        if self._engine is not None and any(isinstance(command, msg.Stop) for command in work):
            self._tell(self._engine.live.end("closed"))
        return work

    def _carry_out(self, command: msg.Watch | msg.Pace | msg.AskExperts | msg.Call) -> None:
        """Do what those who watch ask for. Nobody knows of an engine that is not made yet."""
        if self._engine is None:
            return
        if isinstance(command, msg.Pace):
            self._engine.set(command)
        elif isinstance(command, msg.AskExperts):
            self.send(msg.ExpertLoad(self._engine.expert_load()))
        elif isinstance(command, msg.Call):
            self.send(self._engine.call(command))
        elif command.is_on:
            self._engine.live.begin()
        else:
            self._tell(self._engine.live.end("closed"))

    def _read(self) -> None:
        """Take in what is there; the end of the stream is a `Stop`."""
        data = self._socket.recv(CHUNK)
        self._unread.extend(self._frames.feed(data))
        if not data:
            self._poll.unregister(self._socket)
            self._unread.append(msg.encode(msg.Stop()))

    def send(self, message: msg.EngineMessage) -> None:
        """Say something; before a failure, the last that was seen."""
        if isinstance(message, msg.Failure) and self._engine is not None:
            self._tell(self._engine.live.end(message.message))
        self._socket.sendall(msg.frame(msg.encode(message)))

    def _tell(self, pieces: list[bytes]) -> None:
        if pieces:
            self.send(msg.Seen(pieces))


def serve_socket(fd: int, make_engine: MakeEngine = make_engine) -> bool:
    """Build the engine that the first message describes, and serve it. Returns whether it ended as it was told to."""
    link = SocketLink(socket.socket(fileno=fd))
    try:
        config: EngineConfig = pickle.loads(link.first())
    except (AttributeError, ImportError) as error:  # a class of the user's main program, say
        link.send(msg.Failure(f"{msg.NOT_SENT} ({error})", True))
        return False
    return link.serve(config, make_engine)
