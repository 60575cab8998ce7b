"""Where the engine runs: in a thread of this process, or in a process of its own. Both are at the other end of a pair of Unix sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import select
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile
from typing import cast

from folovllm.apps.inspector.paced import PacedEngine
from folovllm.config import EngineConfig
from folovllm.distributed.children import import_path, python_command
from folovllm.electives.server import messages as msg
from folovllm.electives.server.engine_loop import MakeEngine, run_engine
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.plugins import STRUCTURED_OUTPUT, is_installed

logger = logging.getLogger("folovllm")
Deliver = Callable[[msg.EngineMessage], None]
GRACE = 5.0  # seconds that the engine has to end by itself
BUFFER = 4 << 20  # bytes on their way: the engine need not wait for a server that is busy
CHUNK = 1 << 20  # bytes that are read at once


class EngineClient(asyncio.Protocol, ABC):
    """The server's end of a pair of sockets: starts the engine, carries commands to it, and its messages into the event loop.

    A subclass says what runs at the other end.
    """

    _writer: asyncio.WriteTransport | None = None

    async def start(self, config: EngineConfig, deliver: Deliver) -> None:
        """Start the engine. `deliver` is called in the event loop with each of its messages; the first is `Ready` or a `Failure`."""
        here, there = socket.socketpair()
        for end in (here, there):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        try:
            self._launch(config, there)
        except BaseException:
            here.close()
            there.close()
            raise
        self._deliver, self._frames = deliver, msg.Frames()
        self._writer, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=here)

    def data_received(self, data: bytes) -> None:
        """Deliver the engine's messages that are complete now. The rest of the bytes wait in `_frames`."""
        for message in self._frames.feed(data):
            self._deliver(msg.decode_message(message))

    def connection_lost(self, exc: Exception | None) -> None:
        """Deliver the end as a `Failure`. The engine has said before why it ended, or it was killed."""
        ended = asyncio.get_running_loop().run_in_executor(None, self._wait)
        ended.add_done_callback(lambda how: self._deliver(msg.Failure(how.result())))

    @abstractmethod
    def _launch(self, config: EngineConfig, there: socket.socket) -> None:
        """Start the engine at the end `there`, which it closes when it ends."""

    @abstractmethod
    def _wait(self) -> str:
        """Wait until the engine has ended, if it was started. Returns how it ended."""

    def send(self, command: msg.Command) -> None:
        """Send a command. What is sent to a dead engine is lost."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(msg.frame(msg.encode(command)))

    async def stop(self) -> None:
        """End the engine, and return when it has ended. A second call does nothing."""
        self.send(msg.Stop())
        await asyncio.to_thread(self._wait)
        if self._writer is not None:
            self._writer.close()


class ThreadEngineClient(EngineClient):
    """The engine in a thread of this process: for notebooks, CPUs and tests."""

    _thread: threading.Thread | None = None

    def __init__(self, make_engine: MakeEngine = make_engine) -> None:
        self._make_engine = make_engine

    def _launch(self, config: EngineConfig, there: socket.socket) -> None:
        self._thread = threading.Thread(target=self._run, args=[config, there], name="engine", daemon=True)
        self._thread.start()

    def _run(self, config: EngineConfig, there: socket.socket) -> None:
        with there, suppress(BrokenPipeError):  # the event loop was closed before the engine: nobody is left to be told
            link = SocketLink(there)
            try:
                link.serve(config, self._make_engine)
            except Exception:
                raise
            except BaseException as error:  # the panic of a library in Rust. A process would be seen to end
                logger.exception("the engine has ended")
                link.send(msg.Failure(f"{type(error).__name__}: {error}"))

    def _wait(self) -> str:
        if self._thread is not None:
            self._thread.join()
        return "the engine's thread ended"


class ProcessEngineClient(EngineClient):
    """The engine in a process of its own: two Pythons, two cores."""

    _process: subprocess.Popen[bytes] | None = None

    def _launch(self, config: EngineConfig, there: socket.socket) -> None:
        """Raises ValueError if the configuration cannot be pickled, for example with a user's own proposer in it."""
        try:
            written = pickle.dumps(config)
        except Exception as error:
            raise ValueError(f"{msg.NOT_SENT} ({error})") from error
        command = [*python_command("folovllm.electives.server.engine_process"), str(there.fileno())]
        environment = os.environ | {"PYTHONPATH": import_path()}
        with there, TemporaryFile() as stdin:
            stdin.write(written)
            stdin.seek(0)
            self._process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], stdin=stdin)

    def _wait(self) -> str:
        """What does not end within `GRACE` is killed."""
        if self._process is None:
            return "the engine's process was not started"
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return f"the engine's process ended{f' with exit code {code}' if code >= 0 else f', killed by signal {-code}'}"


class SocketLink:
    """The engine's end. It reads without waiting while the engine has work, and writes until all is written.

    It makes the calls of the server by itself: the engine's loop knows nothing of them.
    """

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
