"""Time what serving costs beside the model: `python -m tools.measure_server`.

Three processes on this machine: the server as `folovllm serve` runs it, its engine, and a client (`folovllm bench serve`) that
reads 256 streams and throws them away. The engine is the real one, with its scheduler and its cache, on a device that samples
made-up tokens after `--step-ms` milliseconds. So a step is as long as on a GPU, and all that is measured is Python: CPU
microseconds a token, which a busy machine hardly disturbs, of the server and of the engine (`tools.measure_host` has those of an
engine alone). With `--transport thread` the engine is a thread of the server, as on a CPU.

At `--step-ms 9.5` 256 streams get 27,000 tokens a second. Where the server cannot keep up streams get several tokens in a
piece, and a token costs less: look at `tokens a piece`, and take a longer step to see what a token costs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from folovllm.bench.report import load
from folovllm.config import EngineConfig
from folovllm.server.app import build_app
from folovllm.server.async_engine import AsyncEngine
from folovllm.server.config import ServerConfig
from folovllm.server.http_protocol import BoundedProtocol
from folovllm.server.link import serve_socket
from folovllm.server.listener import Server, listen
from folovllm.server.transport import ProcessTransport, ThreadTransport
from tools.measure_host import NoDevice, engine_over

PROMPT = 16  # tokens
WARM_UP = 3  # requests that `bench serve` sends first
TICKS = os.sysconf("SC_CLK_TCK")  # of /proc, a second

make_fake_engine = partial(engine_over, NoDevice)


def cpu_seconds(transport: ThreadTransport | ProcessTransport) -> float:
    """CPU seconds of the engine's process, or thread, so far."""
    if isinstance(transport, ProcessTransport):
        fields = Path(f"/proc/{transport.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    thread = transport._thread
    assert thread is not None and thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


async def load_once(url: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Load the server once, from a process of its own; what that client found, by name."""
    workload, found = folder / "workload.jsonl", folder / "found.json"
    workload.write_text(f'{{"prompt_len": {PROMPT}, "output_len": {args.tokens}}}\n' * args.streams)
    words = ["--url", url, "--model", "model", "--clients", str(args.streams), "--workload", str(workload)]
    command = [sys.executable, "-m", "folovllm", "bench", "serve", *words, "--save", str(found)]
    client = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if await client.wait():
        raise RuntimeError(f"{' '.join(command)} ended with code {client.returncode}")
    return {name: metric.median for name, metric in load(found).runs[0].metrics.items()}


async def serve(args: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Serve a client a few times; what each time cost."""
    in_thread = args.transport == "thread"
    command = [sys.executable, "-m", "tools.measure_server", "--step-ms", str(args.step_ms), "--engine"]
    transport = ThreadTransport(make_fake_engine) if in_thread else ProcessTransport(command)
    config = EngineConfig(max_num_seqs=args.streams, max_num_batched_tokens=PROMPT * args.streams, use_tqdm=False)
    listener, tokens = listen("127.0.0.1", 0), (args.streams + WARM_UP) * args.tokens
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncEngine(config, transport=transport) as engine:
            app = build_app(engine, ServerConfig(max_queued_requests=args.streams, served_model_name=["model"]))
            options: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "timeout_graceful_shutdown": 1}
            server = Server(uvicorn.Config(app, http=BoundedProtocol, ws="none", access_log=False, **options))
            listener.listen(2048)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            for _ in range(args.repeats + 1):
                await asyncio.sleep(0.2)
                here, there, kernel = time.process_time(), cpu_seconds(transport), os.times().system
                found = await load_once(f"http://127.0.0.1:{listener.getsockname()[1]}", args, Path(folder))
                in_engine = cpu_seconds(transport) - there
                in_server = time.process_time() - here - in_engine * in_thread
                used = {"server": in_server, "kernel": os.times().system - kernel, "engine": in_engine}
                yield found | {name: 1e6 * seconds / tokens for name, seconds in used.items()}
            server.should_exit = True
            await serving


async def measure(args: argparse.Namespace) -> None:
    """Print a line for each pass; the first one warms up."""
    print(f"{args.streams} streams of {args.tokens} tokens, a step every {args.step_ms} ms; CPU us a token")
    print(f"{'server':>8} {'of it, kernel':>14} {'engine':>8} {'tokens/s':>9} {'tokens a piece':>15}")
    async for seen in serve(args):
        cost = f"{seen['server']:8.1f} {seen['kernel']:14.1f} {seen['engine']:8.1f}"
        print(f"{cost} {seen['output tokens']:9,.0f} {seen['tokens a piece']:15.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=20.0, help="how long the device takes for a step")
    parser.add_argument("--transport", default="process", choices=["process", "thread"], help="where the engine runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)  # a socket: be the engine
    args = parser.parse_args()
    NoDevice.seconds = args.step_ms / 1000
    if args.engine:
        serve_socket(args.engine, make_fake_engine)
    else:
        with asyncio.Runner(loop_factory=uvicorn.Config("", loop="auto").get_loop_factory()) as runner:
            runner.run(measure(args))


if __name__ == "__main__":
    main()
