"""Checks grammars before an engine sees them, in processes beside it: a grammar can be expensive to compile.

`GrammarChecker` is the server's side. Below it is the process (`main`): it reads the tokenizer once, and forks for each grammar.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import Executor
from hashlib import sha256
from pathlib import Path
from typing import Any

from folovllm.distributed.children import import_path, python_command
from folovllm.electives.structured_output import guidance
from folovllm.electives.structured_output.params import GrammarLimits, StructuredOutputsParams

AT_ONCE = 2  # so that a cheap grammar need not wait for an expensive one
MOST_KNOWN = 1024  # verdicts that are kept
STATUS = Path("/proc/self/statm")  # on Linux; elsewhere nothing says how much memory a process has


class GrammarChecker:
    """Checks grammars in processes of their own: one that has read the tokenizer, which waits, and a fork of it for each grammar.

    The first grammar that needs it starts it. A fork that takes more than the limits is ended by the system; one whose client
    leaves, by the end of its connection.
    """

    def __init__(self, limits: GrammarLimits, readers: Executor) -> None:
        """`readers`: whose one thread alone may use the tokenizer."""
        self._limits, self._readers = limits, readers
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._known: dict[bytes, str] = {}  # by a grammar's digest, what is wrong with it; the oldest first
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None  # to the process
        self._setting: tuple[Any, int, list[int]]  # set by `use`

    def use(self, tokenizer: Any, vocab_size: int, end_ids: Collection[int]) -> None:
        """Check grammars for this tokenizer's tokens. Nothing is read before the first of them."""
        self._setting = tokenizer, vocab_size, sorted(end_ids) or [vocab_size - 1]

    async def check(self, asked: StructuredOutputsParams) -> None:
        """Raise ValueError if the grammar cannot be used, or costs too much."""
        if asked.kind == "choice":
            return
        key = sha256(repr(asked).encode()).digest()
        if key not in self._known:
            async with self._slots:
                if key not in self._known:  # another client may have asked meanwhile
                    self._known[key] = await self._ask(asked)
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        if error := self._known[key]:
            raise ValueError(error)

    async def _ask(self, asked: StructuredOutputsParams) -> str:
        """What is wrong with the grammar, "" if nothing. Raises ValueError, which is not kept, if the check does not end."""
        line = await asyncio.get_running_loop().run_in_executor(self._readers, self._started)
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=here)
        verdict = b""
        try:
            with there:
                socket.send_fds(line, [b"?"], [there.fileno()])
            writer.write(pickle.dumps(asked))
            writer.write_eof()
            verdict = await reader.read()
        except OSError:
            pass  # the process has ended meanwhile
        finally:
            writer.close()
        if verdict:
            return verdict[1:].decode()
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError("the process that checks grammars has ended: ask again")
        raise ValueError(
            f"structured_outputs is too complex: to check it takes more than {self._limits.seconds:g} s or "
            f"{self._limits.memory} MiB, so take a simpler grammar (the server's limits are --grammar-seconds, --grammar-memory)"
        )

    def _started(self) -> socket.socket:
        """The line to the process, which is started if need be. Raises ValueError for a tokenizer that cannot be read."""
        if self._line is not None and self._process is not None and self._process.poll() is None:
            return self._line
        self.close()
        tokenizer, vocab_size, end_ids = self._setting
        line, there = socket.socketpair()
        with there, tempfile.TemporaryFile() as setting:
            pickle.dump((self._limits, guidance.tokenizer_json(tokenizer), vocab_size, end_ids), setting)
            setting.seek(0)
            command = python_command("folovllm.electives.structured_output.grammar_check", str(there.fileno()))
            environment = dict(os.environ) | {"PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], stdin=setting)
        self._line = line
        return line

    def close(self) -> None:
        """Kill the fork server; the next check starts another. Running checks are not killed: each ends when its client disconnects."""
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._line = self._process = None


def main() -> None:
    """Check the grammars that come through sockets, which come through the socket of the first argument, until it is closed.

    What is needed for all of them comes through stdin.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended: its socket says it
    os.nice(5)
    limits, *described = pickle.load(sys.stdin.buffer)
    try:
        tokenizer = guidance.make_tokenizer(*described)
    except ValueError as error:  # which every client is told
        tokenizer = error
    with socket.socket(fileno=int(sys.argv[1])) as line:
        while sockets := socket.recv_fds(line, 1, 1)[1]:
            with socket.socket(fileno=sockets[0]) as connection:
                if os.fork() == 0:
                    line.close()
                    connection.sendall(b"=" + verdict_on(connection, limits, tokenizer).encode())
                    os._exit(0)


def verdict_on(connection: socket.socket, limits: GrammarLimits, tokenizer: Any) -> str:
    """What is wrong with the grammar that the connection brings, "" if nothing. Beyond the limits, this process ends."""
    asked = pickle.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
    try:
        if isinstance(tokenizer, ValueError):
            raise tokenizer
        _bound(connection, limits)
        guidance.check_grammar(asked, tokenizer)
    except ValueError as error:
        return str(error)
    return ""


def _bound(connection: socket.socket, limits: GrammarLimits) -> None:
    """Let the system end this process beyond the limits, and at the end of the connection: by signals' own actions."""
    if STATUS.exists():
        now, hard = int(STATUS.read_text().split()[0]), resource.getrlimit(resource.RLIMIT_AS)[1]
        most = now * resource.getpagesize() + (limits.memory << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says when memory is refused
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # of processor time: then SIGPROF
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)  # then SIGIO
    end = select.poll()
    end.register(connection, 0)
    if end.poll(0):  # it has ended before
        os._exit(1)


if __name__ == "__main__":
    main()
