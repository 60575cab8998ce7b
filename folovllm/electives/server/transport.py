"""Where the engine runs: in a thread of this process, or in a process of its own. Both are at the other end of a Unix socket."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from tempfile import TemporaryFile

from folovllm.config import EngineConfig
from folovllm.distributed.children import import_path, python_command
from folovllm.electives.server import messages as msg
from folovllm.electives.server.engine_loop import MakeEngine
from folovllm.electives.server.link import SocketLink
from folovllm.engine.llm_engine import make_engine

logger = logging.getLogger("folovllm")
Deliver = Callable[[msg.EngineMessage], None]
GRACE = 5.0  # seconds that the engine has to end by itself
BUFFER = 4 << 20  # bytes on their way: the engine need not wait for a server that is busy


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
        """Raises ValueError if the configuration cannot be sent, with a proposer of the user's in it say."""
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
