"""A process that has imported the large libraries, and forks a child for each run of pytest: a second in place of six.

`run` starts it at the first call, on Linux. It ends when nobody has asked for ten minutes. It never imports folovllm, whose
files are what changes, and serves one interpreter and one environment: others have a process of their own.
"""

import contextlib
import gc
import hashlib
import importlib
import marshal
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

LIBRARIES = [
    "torch", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3", "safetensors.torch",
    "triton.runtime.interpreter", "pytest", "hypothesis", "pytest_timeout", "_hypothesis_pytestplugin", "rich.console", "typer",
]  # fmt: skip
READ_EARLY = (
    "TRITON_", "OMP_", "MKL_", "CUDA_", "TORCH", "HF_", "TRANSFORMERS_", "PYTHON", "LC_", "LANG", "VIRTUAL_ENV",
)  # fmt: skip
OUT_OF_TIME = 124  # as `timeout` of coreutils says it
IDLE, START = 600, 120  # seconds without a run after which it ends; within which it has to be there


def run(
    words: list[str],
    folder: Path,
    environment: Mapping[str, str],
    out: IO[str] | None = None,
    limit: float | None = None,
) -> int | None:
    """pytest's exit status with these arguments, its words to `out` or to our own output; None where nothing can fork.

    After `limit` seconds it is ended: `OUT_OF_TIME`. `FOLOVLLM_WARM=0` switches all of it off.
    """
    if sys.platform != "linux" or os.environ.get("FOLOVLLM_WARM") == "0":
        return None
    server = _connected(environment)
    if server is None:
        return None
    sys.stdout.flush()
    file = out.fileno() if out else 1
    request = marshal.dumps((words, str(folder), dict(environment)))
    with server:  # where we are interrupted, the server hears the end of it, and ends the run
        socket.send_fds(server, [len(request).to_bytes(8)], [0, file, file if out else 2])
        server.sendall(request)
        server.settimeout(limit)
        try:
            return int.from_bytes(server.recv(1) or b"\1")
        except TimeoutError:
            return OUT_OF_TIME


def address(environment: Mapping[str, str]) -> Path:
    """Where the process for this interpreter and this environment listens, in a folder that is ours alone."""
    early = sorted((k, v) for k, v in environment.items() if k.startswith(READ_EARLY))
    name = hashlib.sha256(repr((sys.executable, sys.version, early)).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir(), f"folovllm-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise ValueError(f"{folder} belongs to somebody else: set FOLOVLLM_WARM=0")
    return folder / name


def _connected(environment: Mapping[str, str]) -> socket.socket | None:
    """A connection to the process, which is started where there is none."""
    place, server = address(environment), socket.socket(socket.AF_UNIX)
    child: subprocess.Popen[bytes] | None = None
    for _ in range(20 * START):
        try:
            server.connect(str(place))
            return server
        except OSError:
            if child is None:
                command = [sys.executable, str(Path(__file__)), str(place)]
                streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
                child = subprocess.Popen(command, env=dict(environment), start_new_session=True, **streams)
            elif child.poll() not in (None, 0):  # 0: another one was there first
                break
        time.sleep(0.05)
    return None


def serve(place: Path) -> None:
    """Fork for whoever connects, until nobody has done so for `IDLE` seconds."""
    listener = socket.socket(socket.AF_UNIX)
    with contextlib.suppress(FileNotFoundError):
        place.unlink()
    listener.bind(str(place))
    listener.listen()
    listener.settimeout(IDLE)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a child of ours
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            place.unlink(missing_ok=True)
            return
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.setblocking(True)
            _attend(connection)
            os._exit(0)
        connection.close()


def _attend(connection: socket.socket) -> None:
    """Run what is asked for in a child, and say its status; end it where the asker is gone."""
    size, files, _, _ = socket.recv_fds(connection, 8, 3)
    request = connection.recv(int.from_bytes(size), socket.MSG_WAITALL)
    child = os.fork()
    if child == 0:
        connection.close()
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        _become(*marshal.loads(request))
    ended = os.pidfd_open(child)
    watched: list[int | socket.socket] = [ended, connection]
    ready, _, _ = select.select(watched, [], [])
    if ended not in ready:
        os.killpg(child, signal.SIGKILL)
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall((status if 0 <= status < 256 else 1).to_bytes(1))


def _become(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Be pytest; never returns."""
    import pytest

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    status = 1
    try:
        status = int(pytest.main(["-Wignore::pytest.PytestAssertRewriteWarning", *words]))
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, in which modules have names of other libraries'
    if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")):
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, as in `folovllm/__init__.py`
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):  # Triton is for Linux on some processors only
            importlib.import_module(library)
    gc.collect()
    gc.freeze()
    serve(Path(sys.argv[1]))
