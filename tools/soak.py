"""Keep a server busy for minutes and watch what it holds: `python tools/soak.py --minutes 10`.

Starts `folovllm serve` with its engine in a process of its own. Clients stream, ask for whole answers, ask for log-probabilities
and several answers, send nonsense, and go away in the middle, at random. A line every few seconds: requests so far, and the
memory of server and engine (resident, MiB). At the end nothing may be left that anybody asked for: no request, no block of the
cache; and the second half of the time may have added less than `--most-growth` MiB to either process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import threading
import time
import urllib.request
from collections import Counter
from http.client import HTTPConnection
from pathlib import Path

from folovllm.bench.serving import own_server

KINDS = ("stream", "whole", "logprobs", "several", "leave", "leave early", "nonsense")
SETTLE = 30.0  # seconds that the last requests may take to end
# Few blocks: each takes memory when it is first used.
FIELDS = {"max_model_len": 512, "max_num_seqs": 32, "num_kv_blocks": 1024, "use_tqdm": False}


def client(port: int, seed: int, enough: threading.Event, counts: Counter[str]) -> None:
    """Ask, one after the other, until it is enough."""
    rng = random.Random(seed)
    while not enough.is_set():
        kind = rng.choice(KINDS)
        prompt, answer = [rng.randrange(4000) for _ in range(rng.randrange(1, 200))], rng.randrange(1, 120)
        fields = {"prompt": prompt, "temperature": 1, "ignore_eos": True, "max_tokens": answer}
        fields |= {"stream": kind not in ("whole", "nonsense")}
        fields |= {"logprobs": {"logprobs": 3}, "several": {"n": 3}, "nonsense": {"max_tokens": "many"}}.get(kind, {})
        connection, status = HTTPConnection("127.0.0.1", port, timeout=60), "-"
        connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        if kind != "leave early":
            response = connection.getresponse()
            status = str(response.status)
            response.read1() if kind == "leave" else response.read()
        connection.close()
        counts[f"{kind}: {status}"] += 1


def resident(pid: int) -> float:
    """MiB of memory that a process has."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gauges(url: str) -> dict[str, float]:
    """What the server says of itself."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: float(re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE)[0]) for name in names}


def soak(seconds: float, num_clients: int, most_growth: float, every: float) -> None:
    """Raises SystemExit with a sentence for whatever is wrong at the end."""
    enough, counts = threading.Event(), Counter[str]()
    with own_server(FIELDS, engine_process=True) as url:
        (server,) = (pid for pid in children(os.getpid()) if children(pid))
        (engine,) = children(server)
        port, threads = int(url.rpartition(":")[2]), list[threading.Thread]()
        for i in range(num_clients):
            threads.append(threading.Thread(target=client, args=(port, i, enough, counts)))
            threads[-1].start()
        begin, seen = time.monotonic(), []
        while time.monotonic() < begin + seconds:
            time.sleep(min(every, max(0.1, begin + seconds - time.monotonic())))
            seen.append((resident(server), resident(engine)))
            memory = "server {:7.1f} MiB   engine {:7.1f} MiB".format(*seen[-1])
            print(f"{time.monotonic() - begin:6.0f} s {counts.total():7d} requests   {memory}", flush=True)
        enough.set()
        for thread in threads:
            thread.join(60)
        end = time.monotonic() + SETTLE
        while any(left := gauges(url).values()) and time.monotonic() < end:
            time.sleep(0.2)
        print(f"afterwards {gauges(url)}; {dict(sorted(counts.items()))}")
        if any(left):
            sys.exit("something is left that nobody waits for")
        half = len(seen) // 2
        for name, sizes in zip(("server", "engine"), zip(*seen[half:], strict=True), strict=True):
            growth = sizes[-1] - sizes[0]
            print(f"{name}: {growth:+.1f} MiB in the second half")
            if growth > most_growth:
                sys.exit(f"the {name} grows: {growth:.1f} MiB in the second half")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--most-growth", type=float, default=16.0, help="MiB in the second half of the time")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two lines")
    args = parser.parse_args()
    soak(60 * args.minutes, args.clients, args.most_growth, args.every)


if __name__ == "__main__":
    main()
