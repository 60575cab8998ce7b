"""Commands of Python that do not import torch anew: each is a child forked from a process that has it.

`Warm` starts that process, which knows the large libraries and never folovllm, and makes a folder with stand-ins named
`python`, `pytest` and `folovllm`. Whoever has the folder first on PATH (or `Warm.python` for `sys.executable`) starts a
stand-in: it sends its arguments, environment, working directory and open files over a Unix socket, hands on signals, and
ends as the child does. What is started by the child, by `sys.executable` or by multiprocessing, is forked likewise.

The real interpreter runs what a fork could not do faithfully: options other than -P, -u, -m and -c, and an environment that differs in what was read when the libraries were imported (`READ_EARLY`).
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import itertools
import marshal
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

PLUGINS = ["_hypothesis_pytestplugin", "pytest_timeout"]
PRELOAD = [  # some are imported only when a kernel runs, pytest loads its plugins, arguments are read, or an interpreter ends
    "torch", "transformers", "triton", "triton.language", "triton.runtime.interpreter", "triton.experimental.gluon",
    "anyio._backends._asyncio", "pytest", "hypothesis", "numpy", *PLUGINS, "_pytest.junitxml", "_pytest.doctest", "_pytest.unittest",
    "_pytest.debugging", "rich.console", "rich.markdown", "rich.syntax", "rich.table", "typer.testing", "typer._adapters",
    "pydantic.fields", "pydantic.type_adapter", "tabulate", "xxhash", "safetensors.torch",
    "transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama",
]  # fmt: skip
READ_EARLY = (
    "TRITON_", "OMP_", "MKL_", "CUDA_", "TORCH", "HF_", "TRANSFORMERS_", "PYTHON", "LC_", "LANG", "VIRTUAL_ENV",
    "TYPER_", "_TYPER_", "TERMINAL_WIDTH",
)  # fmt: skip
NOT_EARLY = (
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "PYTHONDONTWRITEBYTECODE",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST",  # every rank has it
)
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

STAND_IN = """#!{python} -IS
import _socket, array, marshal, os, signal, struct, sys

name, real = os.path.basename(sys.argv[0]), {bin!r}
words = sys.argv[1:] if name.startswith("python") else [os.path.join(real, name), *sys.argv[1:]]
interpreter = os.path.join(real, "python")
files = []
for fd in map(int, os.listdir("/dev/fd")):
    try:
        if os.get_inheritable(fd):
            files.append(fd)
    except OSError:
        pass
request = marshal.dumps((words, os.getcwd(), dict(os.environ), files, signal.getsignal(signal.SIGINT) == signal.SIG_IGN))
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    server.connect({address!r})
except OSError:
    os.execv(interpreter, [interpreter, *words])
server.sendmsg([struct.pack("=Q", len(request))], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files))])
server.sendall(request)
pid = struct.unpack("=i", server.recv(4, _socket.MSG_WAITALL))[0]
if not pid:
    os.execv(interpreter, [interpreter, *words])
for number in {forwarded!r}:
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
status = struct.unpack("=i", server.recv(4, _socket.MSG_WAITALL))[0]
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


class Warm:
    """The process and the folder of stand-ins, which are gone at the end of `with`, with all that was started."""

    def __init__(self, folder: Path, preload: list[str] | None = None) -> None:
        self.folder = folder
        self.python = str(folder / "python")
        address, real = str(folder / "socket"), Path(sys.executable).parent
        variables = {"python": sys.executable, "bin": str(real), "address": address}
        text = STAND_IN.format(**variables, forwarded=tuple(map(int, FORWARDED)))
        for name in ("python", "pytest", "folovllm"):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        command = [sys.executable, "-P", __file__, address, self.python, *(PRELOAD if preload is None else preload)]
        environment = {name: value for name, value in os.environ.items() if name not in NOT_EARLY}
        self._process = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Self:
        assert self._process.stdout and self._process.stdout.readline() == b"ready\n", "no process to fork from"
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def early(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_EARLY) and k not in NOT_EARLY}


def serve(address: str, python: str, before: dict[str, str]) -> None:
    """Fork a child for each request until nobody holds our standard input."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    for file in (listener, woken, 0):
        selector.register(file, selectors.EVENT_READ)
    children: dict[int, socket.socket] = {}
    os.write(1, b"ready\n")
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for pid in children:
                    _kill(pid)
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                request, files = _receive(connection, before)
                if request is None:
                    _tell(connection, 0)
                    connection.close()
                elif pid := os.fork():
                    _tell(connection, pid)
                    children[pid] = connection
                    selector.register(connection, selectors.EVENT_READ, pid)
                else:
                    _become(request, files, python)
                for file in files:
                    os.close(file)
            elif key.fileobj is woken:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                _reap(children, selector)
            elif key.data in children:  # the stand-in was killed
                selector.unregister(key.fileobj)
                _kill(key.data)


def _receive(connection: socket.socket, before: dict[str, str]) -> tuple[Any, list[int]]:
    """A request and its open files; None for what the real interpreter has to do, or who has left meanwhile."""
    files: list[int] = []
    try:
        head, files, _, _ = socket.recv_fds(connection, 8, 250)
        (size,) = struct.unpack("=Q", head)
        request = marshal.loads(connection.recv(size, socket.MSG_WAITALL))
    except (OSError, EOFError, ValueError, struct.error):
        return None, files
    _, words = options_of(request[0])
    can = words and (words[0] in ("-m", "-c", "-") or not words[0].startswith("-"))
    return (request if can and early(request[2]) == before else None), files


def options_of(words: list[str]) -> tuple[set[str], list[str]]:
    """The options -P and -u that a command of Python begins with, and what follows them."""
    options = list(itertools.takewhile(lambda word: word in ("-P", "-u"), words))
    return set(options), words[len(options) :]


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # a stand-in that was killed: its child is, too, once the selector sees that
        connection.sendall(struct.pack("=i", number))


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _reap(children: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        connection = children.pop(pid)
        with contextlib.suppress(KeyError):
            selector.unregister(connection)
        _tell(connection, status)
        connection.close()


def _become(request: Any, received: list[int], python: str) -> None:
    """In the child: be the command that was asked for, and end."""
    words, folder, environment, numbers, deaf = request
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    above = max([*numbers, *received]) + 1
    files = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in received]
    for file in {*map(int, os.listdir("/dev/fd"))} - {*files}:
        with contextlib.suppress(OSError):
            os.close(file)
    for file, number in zip(files, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        stream = open(number, mode, buffering=1 if number == 2 or os.isatty(number) else -1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.executable = python
    multiprocessing.set_executable(python)
    importlib.invalidate_caches()
    sys.path_importer_cache.clear()
    _end(_status(words))


def _status(words: list[str]) -> int:
    """Run a module, a line or a file as `__main__`; its exit status."""
    try:
        _main(words)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _main(words: list[str]) -> None:
    libraries = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    options, (kind, *rest) = options_of(words)
    if "-u" in options:
        sys.stdout.reconfigure(write_through=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind in ("-m", "-c"):
        what, *rest = rest
        first, sys.argv = "" if kind == "-c" else os.getcwd(), [kind, *rest]
    else:
        what, first, sys.argv = kind, os.path.dirname(os.path.realpath(kind)), [kind, *rest]
    sys.path[:0] = [*([] if "-P" in options else [first]), *libraries]
    if kind == "-m":
        runpy._run_module_as_main(what)
    elif kind == "-c":
        exec(compile(what, "<string>", "exec"), vars(main))
    else:
        main.__file__ = what
        exec(compile(Path(what).read_bytes() if what != "-" else sys.stdin.read(), what, "exec"), vars(main))


def _end(status: int) -> None:
    """As an interpreter does, but for taking apart what there is."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 255)


if __name__ == "__main__":
    before = early(os.environ)  # read before the imports, which change it
    for module in sys.argv[3:]:
        importlib.import_module(module)
    assert "folovllm" not in sys.modules, "whether it is the reference or a learner's is for the command to say"
    gc.collect()
    gc.freeze()
    serve(sys.argv[1], sys.argv[2], before)
