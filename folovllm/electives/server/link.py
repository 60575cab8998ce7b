"""The engine's end of a socket. It makes the calls of the server by itself: the engine's loop knows nothing of them."""

from __future__ import annotations

import select
import socket
from typing import cast

from folovllm.apps.inspector.paced import PacedEngine
from folovllm.config import EngineConfig
from folovllm.electives.server import messages as msg
from folovllm.electives.server.engine_loop import MakeEngine, run_engine
from folovllm.engine.llm_engine import LLMEngine
from folovllm.plugins import STRUCTURED_OUTPUT, is_installed

CHUNK = 1 << 20  # bytes that are read at once


class SocketLink:
    """Reads without waiting while the engine has work; writes until all is written."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = msg.Frames()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._engine: PacedEngine | None = None  # once it is made

    def serve(self, config: EngineConfig, make_engine: MakeEngine) -> bool:
        """Build an engine, paced as those who watch it through this link have it, and serve it. Returns whether nothing went wrong."""

        def make(config: EngineConfig) -> LLMEngine:
            engine = make_engine(config)
            if is_installed(STRUCTURED_OUTPUT):
                engine.prepare_structured_outputs()
            self._engine = PacedEngine(engine)
            return cast(LLMEngine, self._engine)

        return run_engine(config, self, make)

    def receive(self, wait: bool) -> list[msg.Work]:
        """What has arrived for the loop, in order. With `wait` it waits for a command, which may be for this link alone."""
        if self._engine is not None:
            self._send_seen(self._engine.take(all_of_it=wait or self._engine.is_slow))
        commands: list[msg.Command] = []
        while self._poll.poll(None if wait and not commands else 0):
            data = self._socket.recv(CHUNK)
            commands += map(msg.decode_command, self._frames.feed(data))
            if not data:  # the end of the stream
                self._poll.unregister(self._socket)
                commands.append(msg.Stop())
        for command in commands:
            if isinstance(command, msg.Call):
                self.send(self._call(command))
        if msg.Stop() in commands:
            self._end_recording("closed")
        return [command for command in commands if not isinstance(command, msg.Call)]

    def _call(self, call: msg.Call) -> msg.Called:
        """Call a method of the engine. Its ValueError is the caller's mistake; any other exception ends the engine."""
        engine, value, error = self._engine, None, None
        assert engine is not None, "the server makes no call before it has heard `Ready`"
        try:
            value = getattr(engine, call.method)(*call.arguments)
        except ValueError as mistake:
            error = str(mistake)
        return msg.Called(value, error, bool(engine.refusal))

    def send(self, message: msg.EngineMessage) -> None:
        """Send a message; before a failure, the last that was seen."""
        if isinstance(message, msg.Failure):
            self._end_recording(message.message)
        self._socket.sendall(msg.frame(msg.encode(message)))

    def _end_recording(self, how: str) -> None:
        if self._engine is not None:
            self._send_seen(self._engine.end_recording(how))

    def _send_seen(self, pieces: list[bytes]) -> None:
        if pieces:
            self.send(msg.Seen(pieces))
