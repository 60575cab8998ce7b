"""Where nothing can fork (Windows, macOS): processes that have imported the large libraries, each for one run of pytest.

`run` takes the one that waits, and starts another for the next run, which imports while this one tests. Each says in a file,
in a folder that is ours alone, at which port it listens and the secret that it wants to hear. Whoever deletes that file has it.
It ends when nobody has asked for ten minutes. `FOLOVLLM_WARM=spawn` has it so on Linux, too.
"""

import contextlib
import gc
import hmac
import json
import marshal
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from milestones import warm

LOOK = 0.05  # seconds between two looks at what a run has said


def run(
    words: list[str], folder: Path, environment: Mapping[str, str], out: IO[str] | None, limit: float | None
) -> int | None:
    """As `warm.run`; None where no such process could be started, and for `--pdb` and `--trace`, which read from the terminal."""
    if {"--pdb", "--trace"} & {*words}:
        return None
    server = _taken(folder, environment)
    if server is None:
        return None
    sys.stdout.flush()
    columns = {"COLUMNS": str(shutil.get_terminal_size().columns)}
    color = ["--color=yes"] if out is None and sys.stdout.isatty() else []
    with server, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        said = Path(out.name if out else Path(place, "said"))
        request = marshal.dumps(([*color, *words], str(folder), {**columns, **environment}, str(said)))
        server.sendall(len(request).to_bytes(8) + request)
        server.settimeout(warm.START)
        with contextlib.suppress(OSError):
            if server.recv(1):  # it has imported all: that is in nobody's limit of time
                return _followed(server, None if out else said, limit)
        return None


def _followed(server: socket.socket, said: Path | None, limit: float | None) -> int:
    """The run's status. What it writes to the file goes to our output meanwhile. Where we are interrupted, it hears that, and ends."""
    end, shown = time.monotonic() + (limit or float("inf")), 0
    while True:
        try:
            server.settimeout(LOOK)
            status = server.recv(1)
        except TimeoutError:
            status = None
        except ConnectionError:  # on Windows, where it was ended
            status = b""
        if said and said.is_file():
            with said.open("rb") as file:
                file.seek(shown)
                text = file.read()
            shown += len(text)
            getattr(sys.stdout, "buffer", sys.__stdout__.buffer).write(text)  # type: ignore[union-attr]
            sys.stdout.flush()
        if status is not None:
            return int.from_bytes(status or b"\1")
        if time.monotonic() > end:
            return warm.OUT_OF_TIME


def _taken(folder: Path, environment: Mapping[str, str]) -> socket.socket | None:
    """A connection to a process that waits, or that imports still; another one is started for the run to come."""
    name, child = warm.key(environment, str(folder)), None
    for _ in range(int(warm.START / LOOK)):
        for file in sorted(warm.private_folder().glob(f"{name}-*.json")):
            with contextlib.suppress(OSError, ValueError):
                port, secret = json.loads(file.read_text())
                file.unlink()  # of two that come at once one has it
                server = socket.create_connection(("127.0.0.1", port))
                server.sendall(secret.encode())
                _start(folder, environment, name)
                return server
        if child is None:
            child = _start(folder, environment, name)
        elif child.poll() is not None:
            break
        time.sleep(LOOK)
    return None


def _start(folder: Path, environment: Mapping[str, str], name: str) -> subprocess.Popen[bytes]:
    """Start a process that imports, and then waits for a run."""
    command = [
        sys.executable,
        "-m",
        "milestones.spare",
        str(warm.private_folder() / f"{name}-{secrets.token_hex(4)}.json"),
    ]
    paths = [str(folder), environment.get("PYTHONPATH", "")]
    own = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen(command, cwd=folder, env=own, start_new_session=True, **streams)


def serve(file: Path) -> None:
    """Import, wait for one request until `IDLE` seconds have gone, and be pytest. Ends with all that it started where the asker is gone."""
    secret = secrets.token_hex(16)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        new = file.with_suffix(".new")
        new.write_text(json.dumps([listener.getsockname()[1], secret]))
        new.replace(file)
        warm.import_libraries()
        gc.freeze()
        listener.settimeout(warm.IDLE)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            file.unlink(missing_ok=True)
            return
    connection.settimeout(warm.START)
    if not hmac.compare_digest(_received(connection, len(secret)), secret.encode()):
        return
    words, folder, environment, said = marshal.loads(_received(connection, int.from_bytes(_received(connection, 8))))
    connection.settimeout(None)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    connection.sendall(b"!")
    for module in [name for name in sys.modules if name.partition(".")[0] == "milestones"]:
        del sys.modules[module]  # the checkout may have changed since
    status = warm.pytest_status(words, folder, environment)
    connection.sendall((status if 0 <= status < 256 else 1).to_bytes(1))
    _end()


def _received(connection: socket.socket, size: int) -> bytes:
    text = b""
    while len(text) < size and (more := connection.recv(size - len(text))):
        text += more
    return text


def _end_with(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)
    _end()


def _end() -> None:
    """End this process and, where there are process groups, all that it has started."""
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
