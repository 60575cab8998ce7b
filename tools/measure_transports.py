"""What an engine in a process of its own costs and brings beside one in a thread: `python tools/measure_transports.py`.

With the device of `measure_server.py`, which draws made-up tokens; clients are a third process. Figures go to
docs/data/x1_serving_cpu.json, beside those of `chapter_x1.py`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from measure_server import Client, MadeUpTokens, cpu_seconds, make_fake_engine

from folovllm.config import EngineConfig
from folovllm.server.app import build_app
from folovllm.server.async_engine import AsyncEngine
from folovllm.server.config import ServerConfig
from folovllm.server.http_protocol import BoundedProtocol
from folovllm.server.link import serve_socket
from folovllm.server.messages import Delta, Frames, SchedulerStats, Step, decode_message, encode, frame
from folovllm.server.serve import Server, listen
from folovllm.server.transport import ProcessTransport, ThreadTransport

DATA = Path(__file__).resolve().parents[1] / "docs" / "data" / "x1_serving_cpu.json"


async def transports(step_ms: float = 60.0, num_streams: int = 128, tokens: int = 50) -> list[dict[str, Any]]:
    """One engine, in a thread and in a process of its own; clients are a third process. Steps are long enough for all."""
    MadeUpTokens.seconds = step_ms / 1000
    found = [border(num_streams)]
    for kind in ("thread", "process"):
        found += [await one_transport(kind, step_ms, num_streams, tokens)]
    print(*found, sep="\n")
    return found


def border(num_streams: int) -> dict[str, Any]:
    """CPU time of what a process adds to a step's message: to write it, and to read it."""
    step = Step(
        [Delta(1000 + i, 0, [20000 + i]) for i in range(num_streams)], SchedulerStats(0, num_streams, 4000, 8000)
    )
    frames, data = Frames(), frame(encode(step))
    write, read = (
        best_of(act) for act in (lambda: frame(encode(step)), lambda: [*map(decode_message, frames.feed(data))])
    )
    return {"streams": num_streams, "bytes": len(data), "write_us": 1e6 * write, "read_us": 1e6 * read}


def best_of(act: Callable[[], Any], times: int = 500) -> float:
    """CPU seconds of a call, the best of several rounds of many."""
    rounds = []
    for _ in range(10):
        before = time.process_time()
        for _ in range(times):
            act()
        rounds.append((time.process_time() - before) / times)
    return min(rounds)


async def one_transport(kind: str, step_ms: float, num_streams: int, tokens: int) -> dict[str, Any]:
    """The best of three passes, after one that warms up."""
    command = [sys.executable, __file__, "engine", str(step_ms)]
    transport = ThreadTransport(make_fake_engine) if kind == "thread" else ProcessTransport(command)
    config = EngineConfig(max_num_seqs=num_streams, max_num_batched_tokens=16 * num_streams, use_tqdm=False)
    listener, passes = listen("127.0.0.1", 0), []
    async with AsyncEngine(config, transport=transport) as engine:
        app = build_app(engine, ServerConfig(max_queued_requests=num_streams))
        options: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "timeout_graceful_shutdown": 1}
        server = Server(uvicorn.Config(app, http=BoundedProtocol, ws="none", access_log=False, **options))
        listener.listen(2048)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        for _ in range(4):
            await asyncio.sleep(0.2)
            before = engine_seconds(transport), time.process_time()
            child = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "client", str(listener.getsockname()[1]), str(num_streams), str(tokens),
                stdout=subprocess.PIPE,
            )  # fmt: skip
            said = json.loads((await child.communicate())[0])
            in_engine, here = engine_seconds(transport) - before[0], time.process_time() - before[1]
            in_server = here - in_engine if kind == "thread" else here
            each = 1e6 / said["tokens"]
            passes.append({"tokens_s": said["tokens"] / said["reading"], "engine_us": each * in_engine,
                           "server_us": each * in_server, "piece": said["tokens"] / said["pieces"]})  # fmt: skip
        server.should_exit = True
        await serving
    best = max(passes[1:], key=lambda p: p["tokens_s"])
    return {"transport": kind, "step_ms": step_ms, "streams": num_streams, **best}


def engine_seconds(transport: ThreadTransport | ProcessTransport) -> float:
    """CPU time of the engine's thread, or process, so far."""
    if isinstance(transport, ProcessTransport):
        return cpu_seconds(transport.pid or 0)
    thread = transport._thread
    assert thread is not None and thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["engine"]:
        MadeUpTokens.seconds = float(arguments[1]) / 1000
        serve_socket(int(arguments[2]), make_fake_engine)
        return
    if arguments[:1] == ["client"]:
        port, num_streams, tokens = map(int, arguments[1:])
        print(json.dumps(Client(port, num_streams, tokens, "/v1/completions").run()))
        return
    torch.set_num_threads(1)
    data = json.loads(DATA.read_text()) if DATA.is_file() else {}
    data["transports"] = asyncio.run(transports())
    DATA.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
