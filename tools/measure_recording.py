"""What it costs to look at an engine: `python tools/measure_recording.py --random-weights qwen3-0.6b`.

One engine serves the same workload again and again, by turns with nobody listening (off), with a recording that is written
to a file (record), and with the lines of the live view handed on as a server's engine does it (live). With `--served` a
server does it: its engine in a process of its own, by turns without (off) and with (live) a client of `/inspector/events`
in a third process; in a third kind of pass (join) the client comes as the pass begins, so that the pass pays for telling it
how everything stands, too. Prints output tokens a second of each pass, and what looking costs: the median over the rounds of
seconds with it over seconds without, less 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from folovllm.bench.contenders import random_model
from folovllm.bench.serve import empty_prefix_cache, exactly, running, warm_up
from folovllm.bench.workload import Workload, load_workload
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.setup import set_up
from folovllm.inspector.paced import LiveLines
from folovllm.inspector.recorder import recording
from folovllm.server.messages import Seen, encode

CLIENT = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
connection.request("GET", "/inspector/events")
response = connection.getresponse()
if sys.argv[2] == "live":
    response.read1(1)  # the beginning has come
print(response.status, flush=True)
size = 0
while data := response.read1(1 << 20):
    size += len(data)
print(size, flush=True)
"""


def run_pass(engine: LLMEngine, workload: Workload, kind: str, folder: Path) -> float:
    """Seconds to serve the workload."""
    empty_prefix_cache(engine)
    lines = LiveLines(engine) if kind == "live" else None
    with recording(engine, folder / "run.jsonl") if kind == "record" else nullcontext(), sink() as write:
        if lines is not None:
            lines.begin()
        start = time.perf_counter()
        for index, request in enumerate(workload.requests):
            params = exactly(request.output_len, workload.temperature, seed=index)
            engine.add_request(str(index), request.prompt, params, stream=False)
        while engine.has_unfinished_requests():
            if lines is not None and (pieces := lines.take(all_of_it=False)):
                write(encode(Seen(pieces)))
            engine.step()
        seconds = time.perf_counter() - start
        if lines is not None:
            lines.end("closed")
    assert not engine.events.on, "the passes must not look at each other"
    return seconds


@contextmanager
def sink() -> Iterator[Any]:
    """A pipe to a process that reads all of it and does nothing."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as reader:
        assert reader.stdin
        yield reader.stdin.write
        reader.stdin.close()


def in_turn(kinds: Iterable[str], rounds: int) -> Iterator[str]:
    """The kinds, round by round; every second round the other way round, so that a drift hits all alike."""
    for number in range(rounds):
        yield from list(kinds)[:: -1 if number % 2 else 1]


def alone(config: EngineConfig, workload: Workload, rounds: int) -> dict[str, list[float]]:
    """Seconds of each pass, by kind, on an engine alone."""
    seconds: dict[str, list[float]] = {"off": [], "record": [], "live": []}
    with tempfile.TemporaryDirectory() as folder, running(config) as engine:
        warm_up(engine, workload)
        run_pass(engine, workload, "off", Path(folder))  # what is made on first use
        for kind in in_turn(seconds, rounds):
            seconds[kind].append(run_pass(engine, workload, kind, Path(folder)))
        print(f"a recording has {Path(folder, 'run.jsonl').stat().st_size / 1e6:.1f} MB")
    return seconds


async def served(config: EngineConfig, workload: Workload, rounds: int) -> dict[str, list[float]]:
    """The same through a server; requests are handed to it in its own process, without HTTP."""
    import uvicorn

    from folovllm.server.app import build_app
    from folovllm.server.async_engine import AsyncEngine
    from folovllm.server.config import ServerConfig
    from folovllm.server.listener import Server, listen

    seconds: dict[str, list[float]] = {"off": [], "live": [], "join": []}
    async with AsyncEngine(config, transport="process") as engine:
        listener = listen("127.0.0.1", 0)
        listener.listen()
        app = build_app(engine, ServerConfig(inspector=True))
        server = Server(uvicorn.Config(app, ws="none", lifespan="off", log_level="warning"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await serve_all(engine, workload, -1)
        for number, kind in enumerate(in_turn(seconds, rounds)):
            client = None if kind == "off" else await look(listener.getsockname()[1], kind)
            seconds[kind].append(await serve_all(engine, workload, number))
            if client is not None:
                client.kill()
                await client.wait()
                await asyncio.sleep(0.5)  # until the engine has heard that nobody looks
            print(f"{kind} {seconds[kind][-1]:.3f} s", file=sys.stderr, flush=True)
        server.should_exit = True
        await serving
    return seconds


async def look(port: int, kind: str) -> asyncio.subprocess.Process:
    """A client, once its stream has begun, or as soon as it was let in (join)."""
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(port), kind, stdout=asyncio.subprocess.PIPE
    )
    assert client.stdout
    assert (await client.stdout.readline()).strip() == b"200"
    return client


async def serve_all(engine: Any, workload: Workload, salt: int) -> float:
    """Seconds until all requests have ended. A salt of its own for each pass, so that none finds another's prefixes."""
    from folovllm.inputs import TokensPrompt

    async def one(index: int) -> None:
        request = workload.requests[index]
        params = exactly(request.output_len, workload.temperature, seed=index)
        async for _ in engine.generate(
            TokensPrompt(prompt_token_ids=request.prompt), params, cache_salt=f"pass {salt}"
        ):
            pass

    start = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(len(workload.requests))))
    return time.perf_counter() - start


def report(seconds: dict[str, list[float]], workload: Workload) -> None:
    """A line for each kind."""
    off = seconds["off"]
    for kind, times in seconds.items():
        rates = "  ".join(f"{workload.output_tokens / t:9,.0f}" for t in times)
        cost = statistics.median(100 * (a / b - 1) for a, b in zip(times, off, strict=True))
        best = 100 * (min(times) / min(off) - 1)
        costs = "" if kind == "off" else f"   costs {cost:+.2f}% (best pass over best: {best:+.2f}%)"
        print(f"{kind:<7} {rates} tok/s{costs}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random-weights", metavar="NAME", help="a geometry: qwen3-0.6b, -4b or -8b")
    parser.add_argument("--workload", default="nano-vllm")
    parser.add_argument("--requests", type=int, help="only the first so many")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--served", action="store_true", help="through a server, with a client in another process")
    parser.add_argument("--milestone", default="m6")
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    wanted = parser.parse_args()
    common = {"milestone": wanted.milestone, "max_num_batched_tokens": wanted.max_num_batched_tokens, "use_tqdm": False}
    with tempfile.TemporaryDirectory() as folder:
        if wanted.random_weights:
            common = random_model(wanted.random_weights, Path(folder), common)
        config = EngineConfig(**common)
        workload = load_workload(wanted.workload, set_up(config).vocab_size, wanted.requests)
        print(f"{len(workload.requests)} requests, {workload.output_tokens} output tokens, {os.cpu_count()} CPU cores")
        if wanted.served:
            report(asyncio.run(served(config, workload, wanted.rounds)), workload)
        else:
            report(alone(config, workload, wanted.rounds), workload)


if __name__ == "__main__":
    main()
