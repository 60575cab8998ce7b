"""Where the engine runs: in a thread of this process, or in a process of its own. The other side cannot tell."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import queue
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Protocol

from folovllm.build import make_engine
from folovllm.children import import_path, python_command
from folovllm.config import EngineConfig
from folovllm.server.engine_loop import run_engine
from folovllm.server.messages import NOT_SENT, Command, Failure, Frames, News, Stop, decode_news, encode, frame
from folovllm.server.watched import MakeWatchable, WatchedLink

logger = logging.getLogger("folovllm")
Deliver = Callable[[News], None]
GRACE = 5.0  # seconds that the engine has to end by itself
BUFFER = 4 << 20  # bytes on their way: the engine need not wait for a server that is busy


class Transport(Protocol):
    """The server's end: starts the engine, carries commands to it, and news from it into the event loop."""

    async def start(self, config: EngineConfig, deliver: Deliver) -> None:
        """Start the engine. `deliver` is called in the event loop with each of its messages; the first is `Ready` or a `Failure`."""

    def send(self, command: Command) -> None:
        """Tell the engine something. What is said to a dead one is lost."""

    async def stop(self) -> None:
        """End the engine, and return when it has ended. A second call does nothing."""


class ThreadTransport:
    """The engine in a thread of this process: for notebooks, CPUs and tests."""

    def __init__(self, make_engine: MakeWatchable = make_engine) -> None:
        self._make_engine = make_engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, config: EngineConfig, deliver: Deliver) -> None:
        """As `Transport` has it."""
        self._loop, self._deliver = asyncio.get_running_loop(), deliver
        self._thread = threading.Thread(target=self._run, args=[config], name="engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """As `Transport` has it."""
        self._commands.put(command)

    async def stop(self) -> None:
        """As `Transport` has it."""
        self._commands.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _run(self, config: EngineConfig) -> None:
        link = WatchedLink(_ThreadLink(self._commands, self._loop, self._deliver))
        try:
            run_engine(config, link, link.making(self._make_engine))
        except BaseException as error:  # no `Exception`: the panic of a library in Rust. A process would be seen to end
            logger.exception("the engine has ended")
            link.send(Failure(f"{type(error).__name__}: {error}"))


class _ThreadLink:
    """The engine's end of a `ThreadTransport`."""

    def __init__(self, commands: queue.SimpleQueue[Command], loop: asyncio.AbstractEventLoop, deliver: Deliver) -> None:
        self._commands, self._loop, self._deliver = commands, loop, deliver

    def receive(self, wait: bool) -> list[Command]:
        """As `Link` has it."""
        if self._loop.is_closed():  # the engine was not closed, and nobody is left who could
            return [Stop()]
        commands = [self._commands.get()] if wait else []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands

    def send(self, news: News) -> None:
        """As `Link` has it."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, news)


class ProcessTransport:
    """The engine in a process of its own, at the other end of a Unix socket: two Pythons, two cores.

    Args:
        command: the program to run, which serves the socket whose number is its last argument.
    """

    def __init__(self, command: list[str] | None = None) -> None:
        self._command = command or python_command("folovllm.server.engine_process")
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.WriteTransport | None = None

    @property
    def pid(self) -> int | None:
        """The engine's process."""
        return None if self._process is None else self._process.pid

    async def start(self, config: EngineConfig, deliver: Deliver) -> None:
        """As `Transport` has it. Raises ValueError if `config` cannot be sent, with a proposer of the user's in it say."""
        try:
            first = frame(pickle.dumps(config))
        except Exception as error:
            raise ValueError(f"{NOT_SENT} ({error})") from error
        here, there = socket.socketpair()
        with there:
            for end in (here, there):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            command = [*self._command, str(there.fileno())]
            environment = dict(os.environ) | {"PYTHONPATH": import_path()}
            self._process = subprocess.Popen(
                command, env=environment, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL
            )
        protocol = _Receiver(deliver, self._process)
        loop = asyncio.get_running_loop()
        self._writer, _ = await loop.create_unix_connection(lambda: protocol, sock=here)
        self._writer.write(first)

    def send(self, command: Command) -> None:
        """As `Transport` has it."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(encode(command)))

    async def stop(self) -> None:
        """As `Transport` has it. What does not end within `GRACE` is killed."""
        self.send(Stop())
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._writer is not None:
            self._writer.close()


class _Receiver(asyncio.Protocol):
    """Delivers each message when it is whole, and the end of the process as a `Failure`."""

    def __init__(self, deliver: Deliver, process: subprocess.Popen[bytes]) -> None:
        self._deliver, self._process, self._frames = deliver, process, Frames()

    def data_received(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            self._deliver(decode_news(message))

    def connection_lost(self, error: Exception | None) -> None:
        """The engine has said why it ended, or was killed. Its exit code takes a moment to come."""
        asyncio.get_running_loop().call_later(0.05, self._tell_the_end)

    def _tell_the_end(self) -> None:
        code = self._process.poll()
        how = "" if code is None else f" with exit code {code}" if code >= 0 else f", killed by signal {-code}"
        self._deliver(Failure(f"the engine's process ended{how}"))
