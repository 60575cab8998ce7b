"""The process that checks grammars: it reads the tokenizer once, and forks for each grammar. The fork is what may fail."""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from folovllm.structured_output import guidance
from folovllm.structured_outputs import GrammarLimits

STATUS = Path("/proc/self/statm")  # on Linux; elsewhere nothing says how much memory a process has


def main() -> None:
    """Check the grammars that come through sockets, which come through the socket of the first argument, until it is closed.

    The second argument is the number of a file that says what is needed for all of them.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended: its socket says it
    os.nice(5)
    with os.fdopen(int(sys.argv[2]), "rb") as setting:
        setting.seek(0)
        limits, *described = pickle.load(setting)
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
    if isinstance(tokenizer, ValueError):
        return str(tokenizer)
    _bound(connection, limits)
    try:
        guidance.check_grammar(asked, tokenizer)
    except ValueError as error:
        return str(error)
    return ""


def _bound(connection: socket.socket, limits: GrammarLimits) -> None:
    """Let the system end this process beyond the limits, and at the end of the connection: by signals' own actions."""
    if STATUS.exists():
        pages = int(STATUS.read_text().split()[0])
        most = pages * resource.getpagesize() + (limits.memory << 20)
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
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
