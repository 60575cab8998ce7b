"""Programs that a measurement runs: for how long, on which cores, and how much of them they used."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

TICKS = os.sysconf("SC_CLK_TCK")  # of /proc, a second
CPUS = Path("/sys/devices/system/cpu")


class Measurement:
    """All that was found so far, and how much time is left."""

    def __init__(self, out: Path, seconds: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out, self._end = out, time.monotonic() + seconds
        self.found: dict[str, Any] = {}

    def left(self, most: float) -> float:
        """Seconds for the next step."""
        return min(most, self._end - time.monotonic())

    def note(self, name: str, what: Any) -> None:
        """Keep a result, and show it."""
        self.found[name] = what
        (self.out / "serving.json").write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"{name}: {json.dumps(what)}", flush=True)

    def run(self, name: str, command: list[str], most: float, env: dict[str, str]) -> str | None:
        """Run a program to its end; what it said, or None where it failed or took too long."""
        seconds = self.left(most)
        if seconds <= 0:
            self.note(name, {"error": "no time was left"})
            return None
        try:
            done = subprocess.run(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired as error:
            self.note(name, {"error": f"took more than {seconds:.0f} s", "said": str(error.stdout)[-1500:]})
            return None
        if done.returncode:
            self.note(name, {"error": f"status {done.returncode}", "said": done.stdout[-1500:]})
            return None
        return done.stdout


class Place:
    """Where a program runs: a GPU and cores of its own, or the whole machine. ValueError where there are too few cores."""

    def __init__(self, index: int, of: int) -> None:
        cores = whole_cores(os.sched_getaffinity(0))
        if of > len(cores):
            raise ValueError(f"{of} programs at once need as many cores, and there are {len(cores)}: run one at a time")
        mine = chain.from_iterable(cores[index * len(cores) // of : (index + 1) * len(cores) // of])
        self.before = ["taskset", "-c", ",".join(map(str, mine))] if of > 1 else []
        self.env = {"CUDA_VISIBLE_DEVICES": str(index)} if of > 1 else {}


def whole_cores(cpus: Iterable[int]) -> list[list[int]]:
    """The CPUs by core: hyper-threads of one core are together. Where the machine does not say so, each is a core."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        try:
            core = (CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            core = str(cpu)
        cores.setdefault(core, []).append(cpu)
    return list(cores.values())


@dataclass(frozen=True, slots=True)
class Start:
    """How a server is started, where, and the port at which it then answers."""

    command: list[str]
    port: int
    place: Place
    env: dict[str, str]


class Server:
    """A server that runs within a `with` block; its end is the end of all that it has started."""

    def __init__(self, measurement: Measurement, name: str, start: Start) -> None:
        self.name, self.port, self.place, self._measurement = name, start.port, start.place, measurement
        self._began = time.monotonic()
        with (measurement.out / f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                start.place.before + start.command,
                env=start.env | start.place.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(8)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def is_ready(self, most: float) -> bool:
        """Wait until it is healthy, at most so many seconds after its start; say whether it is."""
        end = time.monotonic() + self._measurement.left(most - (time.monotonic() - self._began))
        while self.process.poll() is None and time.monotonic() < end and not is_healthy(self.port):
            time.sleep(0.5)
        took, ready = time.monotonic() - self._began, self.process.poll() is None and is_healthy(self.port)
        if ready:
            self._measurement.note(f"{self.name}: start-up seconds, at most", round(took, 1))
        else:
            self._measurement.note(f"{self.name}: start-up", {"error": f"not there after {took:.0f} s"})
        return ready


def is_healthy(port: int) -> bool:
    """Whether a server answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def cpu_seconds(session: int) -> dict[str, float]:
    """What each process of a session has used so far, by a name for it: the server itself, and those that it started."""
    used: dict[str, float] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has ended
        fields = rest.split()
        if int(fields[3]) == session:
            pid = int(stat.parent.name)
            used["server" if pid == session else f"{name} {pid}"] = (int(fields[11]) + int(fields[12])) / TICKS
    return used
