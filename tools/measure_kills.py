"""How soon nothing is left after a `kill -9`: `python tools/measure_kills.py --rounds 10`.

Starts `folovllm serve` with its engine in a process of its own, by turns with one rank and with two, opens streams, and kills
the server or the engine. Prints the seconds until every process below was gone, and, where the engine was killed, until every
stream had ended with an error event: of each round, and the worst.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from folovllm.bench.own_server import own_server

BODY = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
FIELDS: dict[str, Any] = {"max_model_len": 2048, "use_tqdm": False}
GIVE_UP = 60.0  # seconds


class Client(threading.Thread):
    """One stream, read to its end."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=GIVE_UP)
        self._connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
        self._response = self._connection.getresponse()
        self._response.readline()
        self.has_error, self.ended = False, 0.0

    def run(self) -> None:
        """Until the end, an error or not."""
        try:
            for line in self._response:
                self.has_error |= line.startswith(b'data: {"error"')
        except (OSError, http.client.HTTPException):
            pass  # the server was killed: there is nobody to say more
        self.ended = time.monotonic()


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    try:
        own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*own, *(other for child in own for other in below(child))]


def is_gone(pid: int) -> bool:
    """Whether there is no such process, or nothing of it but its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def kill(which: str, num_ranks: int, num_streams: int) -> tuple[float, float | None]:
    """Seconds until all processes were gone, and until all streams had ended with an error. Raises SystemExit if not."""
    with own_server(FIELDS | {"tensor_parallel_size": num_ranks}, engine_process=True) as url:
        server, engine, *ranks = below(os.getpid())
        clients = [Client(url) for _ in range(num_streams)]
        for client in clients:
            client.start()
        began = time.monotonic()
        os.kill(server if which == "server" else engine, signal.SIGKILL)
        while not all(map(is_gone, [engine, *ranks])):
            if time.monotonic() > began + GIVE_UP:
                raise SystemExit(f"processes are left after {GIVE_UP:g} s")
            time.sleep(0.001)
        gone = time.monotonic() - began
        for client in clients:
            client.join()
        if which == "server":
            return gone, None
        if not all(client.has_error for client in clients):
            raise SystemExit("a stream ended without an error event")
        return gone, max(client.ended for client in clients) - began


def main() -> None:
    """Kill, again and again, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    wanted = parser.parse_args()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{os.cpu_count()} CPU cores, load {load}")
    for num_ranks in (1, 2):
        for which in ("server", "engine"):
            found = [kill(which, num_ranks, wanted.streams) for _ in range(wanted.rounds)]
            gone, ended = [pair[0] for pair in found], [pair[1] for pair in found if pair[1] is not None]
            line = f"{which} killed, {num_ranks} rank{'s' * (num_ranks > 1)}: gone after at most {max(gone):.2f} s"
            line += f", streams ended after at most {max(ended):.2f} s" if ended else ""
            print(line + "   " + " ".join(f"{value:.2f}" for value in gone), flush=True)


if __name__ == "__main__":
    main()
