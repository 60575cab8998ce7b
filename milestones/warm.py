"""A process that has imported the large libraries, and forks a child for each run of pytest: a second in place of six.

`run` starts it at the first call, on Linux (an `Owner` has one of its own, that nobody else can reach). It ends when nobody has asked for ten minutes. It never imports folovllm, whose
files are what changes, and serves one interpreter and one environment: others have a process of their own.
"""

import contextlib
import ctypes
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
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

LIBRARIES = [
    "torch", "transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3", "safetensors.torch",
    "triton.runtime.interpreter", "triton.experimental.gluon", "anyio._backends._asyncio", "pytest",
    "hypothesis", "pytest_timeout", "_hypothesis_pytestplugin", "rich.console", "typer",
]  # fmt: skip
READ_EARLY = (
    "TRITON_", "OMP_", "MKL_", "CUDA_", "TORCH", "HF_", "TRANSFORMERS_", "PYTHON", "LC_", "LANG", "VIRTUAL_ENV",
)  # fmt: skip
OUT_OF_TIME = 124  # as `timeout` of coreutils says it
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl
IDLE, START = 600, 120  # seconds without a run after which it ends; within which it has to be there


def run(
    words: list[str],
    folder: Path,
    environment: Mapping[str, str],
    out: IO[str] | None = None,
    limit: float | None = None,
) -> int | None:
    """pytest's exit status with these arguments, its words to `out` or to our own output; None where nothing can fork.

    After `limit` seconds it is ended: `OUT_OF_TIME`. `FOLOVLLM_WARM=0` switches all of it off. Where nothing can fork, a
    process of `milestones.spare` runs them.
    """
    how = os.environ.get("FOLOVLLM_WARM")
    if how == "0":
        return None
    if sys.platform != "linux" or how == "spawn":
        from milestones import spare

        return spare.run(words, folder, environment, out, limit)
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
    return private_folder() / key(environment)


def key(environment: Mapping[str, str], folder: str = "") -> str:
    """A name for this interpreter, what of the environment is read when the libraries are imported, and a checkout."""
    early = sorted((k, v) for k, v in environment.items() if k.startswith(READ_EARLY))
    return hashlib.sha256(repr((sys.executable, sys.version, early, folder)).encode()).hexdigest()[:16]


def private_folder() -> Path:
    """A folder that nobody else can read."""
    folder = Path(tempfile.gettempdir(), f"folovllm-{os.getuid() if sys.platform != 'win32' else 'warm'}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if sys.platform != "win32" and folder.stat().st_uid != os.getuid():  # Windows has such a folder for each user
        raise ValueError(f"{folder} belongs to somebody else: set FOLOVLLM_WARM=0")
    return folder


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


class Owner:
    """Runs pytest in process groups of their own, of which nothing is left when a run is over. Threads may share it.

    On Linux they are forks of a process that only the owner can reach, and what a run leaves behind is ended though it has
    left its group. Elsewhere, and with `FOLOVLLM_WARM=0`, each is a process from scratch.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment, self._lock = dict(environment), threading.Lock()
        self._channel: socket.socket | None = None
        self._can_fork = sys.platform == "linux" and os.environ.get("FOLOVLLM_WARM") != "0"

    def close(self) -> None:
        """End the process to fork from. The owner may still be used: it starts another one."""
        if self._channel:
            self._channel.close()
        self._channel = None

    def run(
        self, words: list[str], folder: Path, environment: Mapping[str, str], said: Path, limit: float
    ) -> tuple[int, str]:
        """(pytest's exit status with these arguments in this folder, its `--course-report`); after `limit` seconds `OUT_OF_TIME`.

        Its words go to the file `said`. The report comes through a pipe where there are pipes with a name (not on Windows): what
        was written cannot be taken back, so the report of a run in which two are written is no JSON.
        """
        if sys.platform == "win32":
            report = said.with_suffix(".json")
            status = self._run([f"--course-report={report}", *words], folder, environment, said, limit)
            return status, report.read_text("utf-8") if report.is_file() else ""
        ours, theirs = os.pipe()
        text = bytearray()
        reader = threading.Thread(target=_read_all, args=(ours, text))
        reader.start()
        try:
            status = self._run(words, folder, environment, said, limit, theirs)
        finally:
            os.close(theirs)
            reader.join(10)  # at once, unless a process that has left the group holds the other end
        return status, text.decode(errors="replace")

    def _run(
        self,
        words: list[str],
        folder: Path,
        environment: Mapping[str, str],
        said: Path,
        limit: float,
        report: int | None = None,
    ) -> int:
        with said.open("w") as out, Path(os.devnull).open() as nothing:
            if self._can_fork and report is not None:
                files = [nothing.fileno(), out.fileno(), out.fileno(), report]
                return self._forked(words, folder, environment, files, limit)
            pipes = () if report is None else (report,)
            command = [sys.executable, "-m", "pytest", *_reported(words, pipes)]
            streams: Any = {"stdin": nothing, "stdout": out, "stderr": out}
            own = dict(environment)
            child = subprocess.Popen(command, cwd=folder, env=own, start_new_session=True, pass_fds=pipes, **streams)
            try:
                return child.wait(limit)
            except subprocess.TimeoutExpired:
                return OUT_OF_TIME
            finally:
                if sys.platform != "win32":
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
                child.kill()
                child.wait()

    def _forked(
        self, words: list[str], folder: Path, environment: Mapping[str, str], files: list[int], limit: float
    ) -> int:
        request = marshal.dumps((words, str(folder), dict(environment)))
        ours = self._connection()
        with ours:
            try:
                socket.send_fds(ours, [len(request).to_bytes(8)], files)
                ours.sendall(request)
                ours.settimeout(limit)
                return int.from_bytes(ours.recv(1) or b"\1")
            except TimeoutError:
                ours.shutdown(socket.SHUT_WR)  # the end of which is heard, and all of the run ended
                ours.settimeout(START)
                ours.recv(1)
                return OUT_OF_TIME
            except OSError:  # the process that forked has been killed
                return 1

    def _connection(self) -> socket.socket:
        """A new connection to a child of the process to fork from, which is started where it is gone."""
        with self._lock:
            for _ in range(2):
                ours, theirs = socket.socketpair()
                with theirs:
                    try:
                        socket.send_fds(self._started(), [b"!"], [theirs.fileno()])
                        return ours
                    except OSError:
                        ours.close()
                        self.close()
        raise ValueError("the process that runs the tests was ended twice")

    def _started(self) -> socket.socket:
        if self._channel is None:
            self._channel, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, str(Path(__file__)), str(theirs.fileno())]
                streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
                fds, own = [theirs.fileno()], self._environment
                subprocess.Popen(command, env=own, start_new_session=True, pass_fds=fds, **streams)
            self._channel.recv(1)  # it has imported all: that is in nobody's limit of time
        return self._channel


def _reported(words: list[str], pipes: Sequence[int]) -> list[str]:
    """pytest's arguments, with the report to a pipe that is open."""
    return [*(f"--course-report=/dev/fd/{pipe}" for pipe in pipes), *words]


def _read_all(pipe: int, text: bytearray) -> None:
    while some := os.read(pipe, 65536):
        text += some
    os.close(pipe)


def serve_owner(channel: socket.socket) -> None:
    """Fork for each connection that comes over the channel, until its other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    channel.sendall(b"!")
    while True:
        _, files, _, _ = socket.recv_fds(channel, 1, 1)
        if not files:
            return
        if os.fork() == 0:
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            _attend(socket.socket(fileno=files[0]), end_what_is_left=True)
            os._exit(0)
        os.close(files[0])


def _end_what_is_left() -> None:
    """Kill what a run has started and left: orphans are ours, also those that left its process group."""
    while children := Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        for child in map(int, children):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


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


def _attend(connection: socket.socket, end_what_is_left: bool = False) -> None:
    """Run what is asked for in a child, and say its status; end it where the asker is gone."""
    size, files, _, _ = socket.recv_fds(connection, 8, 4)
    request = connection.recv(int.from_bytes(size), socket.MSG_WAITALL)
    child = os.fork()
    if child == 0:
        connection.close()
        os.setsid()
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        words, folder, environment = marshal.loads(request)
        _become(_reported(words, files[3:]), folder, environment)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(child)
    watched: list[int | socket.socket] = [ended, connection]
    ready, _, _ = select.select(watched, [], [])
    if ended not in ready:
        os.killpg(child, signal.SIGKILL)
        if not end_what_is_left:
            return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if end_what_is_left:
        _end_what_is_left()
    connection.sendall((status if 0 <= status < 256 else 1).to_bytes(1))


def _become(words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Be pytest; never returns."""
    os._exit(pytest_status(words, folder, environment))


def pytest_status(words: list[str], folder: str, environment: dict[str, str]) -> int:
    """Run pytest in this process, as if it had been started there and with nothing else in its environment."""
    import pytest

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # of the environment, and not of the process that was forked
    sys.path[:0] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    status = 1
    with contextlib.suppress(BaseException):
        status = int(pytest.main(["-Wignore::pytest.PytestAssertRewriteWarning", *words]))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


def import_libraries() -> None:
    """Import all that is large and never changes."""
    if not (os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")):
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, as in `folovllm/__init__.py`
    for library in LIBRARIES:
        with contextlib.suppress(ImportError):  # Triton is for Linux on some processors only
            importlib.import_module(library)
    gc.collect()


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, in which modules have names of other libraries'
    import_libraries()
    gc.freeze()
    if sys.argv[1].isdigit():
        serve_owner(socket.socket(fileno=int(sys.argv[1])))
    else:
        serve(Path(sys.argv[1]))
