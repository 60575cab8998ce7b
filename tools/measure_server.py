"""Time what serving costs beside the model: `python tools/measure_server.py`.

Three processes on this machine: the server as `folovllm serve` runs it, its engine, and a client that reads 256 streams and
throws them away. The engine is the real one, with its scheduler and its cache, on a device that draws made-up tokens after
`--step-ms` milliseconds. So a step is as long as on a GPU, and all that is measured is Python: CPU microseconds a token, which
a busy machine hardly disturbs, of the server and of the engine; and of the same engine without a server, offline. With
`--transport thread` the engine is a thread of the server, as on a CPU.

At `--step-ms 9.5` 256 streams get 27,000 tokens a second. Where the server cannot keep up streams get several tokens in a
piece, and a token costs less: look at `tokens a piece`, and take a longer step to see what a token costs alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

import folovllm.build
from folovllm.config import EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from folovllm.server.app import build_app
from folovllm.server.async_engine import AsyncEngine
from folovllm.server.config import ServerConfig
from folovllm.server.http_protocol import BoundedProtocol
from folovllm.server.link import serve_socket
from folovllm.server.serve import Server, listen
from folovllm.server.transport import ProcessTransport, ThreadTransport
from folovllm.setup import EngineSetup
from folovllm.step.schedule import NothingScheduled, SchedulerOutput, StepResult

PROMPT = 16
TICKS = os.sysconf("SC_CLK_TCK")  # of /proc, a second


class MadeUpTokens:
    """An executor whose steps take a fixed time, none of it on the CPU."""

    seconds = 0.0
    num_kv_blocks = 1 << 15

    def __init__(self, setup: EngineSetup, extension: object) -> None:
        self._free_at = 0.0
        self._word = 0

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """As `Executor` has it."""
        return self.submit(output).wait()

    def submit(self, output: SchedulerOutput) -> PendingTokens:
        """As `AsyncExecutor` has it: steps follow each other on the device."""
        if not output.scheduled_seqs:
            raise NothingScheduled
        self._word = (self._word + 1) % 3000
        self._free_at = max(self._free_at, time.monotonic()) + self.seconds
        return PendingTokens([scheduled.num_samples for scheduled in output.scheduled_seqs], self._word, self._free_at)

    def shutdown(self) -> None:
        """Nothing is held."""


@dataclass(slots=True)
class PendingTokens:
    """A step that ends at `end`."""

    num_samples: list[int]
    word: int
    end: float

    def wait(self) -> StepResult:
        """Sleep until then."""
        time.sleep(max(0.0, self.end - time.monotonic()))
        return StepResult([[400 + self.word + i % 500] * n for i, n in enumerate(self.num_samples)], {})


def make_fake_engine(config: EngineConfig) -> LLMEngine:
    """An engine as `build.make_engine` makes it, but for the device."""
    folovllm.build.make_executor = MadeUpTokens  # type: ignore[assignment]
    return folovllm.build.make_engine(config)


def config_of(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(max_num_seqs=args.streams, max_num_batched_tokens=PROMPT * args.streams, use_tqdm=False)


def offline(args: argparse.Namespace) -> float:
    """CPU microseconds a token of the engine alone, the least of two passes."""
    engine = make_fake_engine(config_of(args))
    best = float("inf")
    for _ in range(2):
        for i in range(args.streams):
            params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=args.tokens)
            engine.add_request(str(i), [(7 * i + j) % 4000 for j in range(PROMPT)], params, stream=False)
        start = time.process_time()
        while engine.has_unfinished_requests():
            engine.step()
        best = min(best, time.process_time() - start)
    engine.close()
    return 1e6 * best / (args.streams * args.tokens)


@dataclass
class Client:
    """Reads many streams from one thread."""

    port: int
    streams: int
    tokens: int
    path: str
    pieces: int = 0
    bodies: dict[socket.socket, bytes] = field(default_factory=dict)

    def run(self) -> dict[str, Any]:
        """Ask for all, then read all."""
        ready = selectors.DefaultSelector()
        for i in range(self.streams):
            connection = socket.create_connection(("127.0.0.1", self.port))
            connection.sendall(self.request(i))
            ready.register(connection, selectors.EVENT_READ)
            self.bodies[connection] = b""
        start, first, num_open = time.perf_counter(), 0.0, self.streams
        while num_open:
            for key, _ in ready.select():
                assert isinstance(key.fileobj, socket.socket)
                data = key.fileobj.recv(1 << 16)
                first = first or time.perf_counter()
                self.pieces += data.count(b"\n\n")
                self.bodies[key.fileobj] = (self.bodies[key.fileobj] + data)[-400:]
                if not data:
                    ready.unregister(key.fileobj)
                    num_open -= 1
        end = time.perf_counter()
        got = sum(
            int(found[1]) for body in self.bodies.values() if (found := re.search(rb'"completion_tokens":(\d+)', body))
        )
        return {"seconds": end - start, "reading": end - first, "tokens": got, "pieces": self.pieces}

    def request(self, i: int) -> bytes:
        """The bytes of one."""
        ids = [(7 * i + j) % 4000 for j in range(PROMPT)]
        prompt = {"messages": [{"role": "user", "content": "Hello"}]} if "chat" in self.path else {"prompt": ids}
        fields = {"max_tokens": self.tokens, "temperature": 0.6, "ignore_eos": True, "stream": True}
        body = json.dumps(prompt | fields | {"stream_options": {"include_usage": True}}).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        )
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def cpu_seconds(transport: ThreadTransport | ProcessTransport) -> float:
    """CPU seconds of the engine's process, or thread, so far."""
    if isinstance(transport, ProcessTransport):
        fields = Path(f"/proc/{transport.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS
    thread = transport._thread
    assert thread is not None and thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


async def serve(args: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Serve a client a few times; what each time cost."""
    command = [sys.executable, __file__, "--step-ms", str(args.step_ms), "--engine"]
    in_thread = args.transport == "thread"
    transport = ThreadTransport(make_fake_engine) if in_thread else ProcessTransport(command)
    listener = listen("127.0.0.1", 0)
    async with AsyncEngine(config_of(args), transport=transport) as engine:
        app = build_app(engine, ServerConfig(max_queued_requests=args.streams))
        options: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "timeout_graceful_shutdown": 1}
        server = Server(uvicorn.Config(app, http=BoundedProtocol, ws="none", access_log=False, **options))
        listener.listen(2048)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        for _ in range(args.repeats + 1):
            await asyncio.sleep(0.2)
            here, there, kernel = time.process_time(), cpu_seconds(transport), os.times().system
            client = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--client", str(listener.getsockname()[1]), "--streams", str(args.streams),
                "--tokens", str(args.tokens), "--path", args.path, stdout=subprocess.PIPE,
            )  # fmt: skip
            said = json.loads((await client.communicate())[0])
            in_engine = cpu_seconds(transport) - there
            used = {
                "server": time.process_time() - here - in_engine * in_thread,
                "kernel": os.times().system - kernel,
                "engine": in_engine,
            }
            yield said | {name: 1e6 * seconds / said["tokens"] for name, seconds in used.items()}
        server.should_exit = True
        await serving


async def measure(args: argparse.Namespace) -> None:
    """A line for each pass; the first one warms up."""
    alone = json.loads(
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--offline"], capture_output=True, check=True).stdout
    )
    print(
        f"{args.streams} streams of {args.tokens} tokens, {args.path}, a step every {args.step_ms} ms; CPU us a token"
    )
    print(f"{'server':>8} {'of it, kernel':>14} {'engine':>8} {'offline':>8} {'tokens/s':>9} {'tokens a piece':>15}")
    async for seen in serve(args):
        rate, piece = seen["tokens"] / seen["reading"], seen["tokens"] / seen["pieces"]
        print(
            f"{seen['server']:8.1f} {seen['kernel']:14.1f} {seen['engine']:8.1f} {alone:8.1f} {rate:9,.0f} {piece:15.2f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=20.0, help="how long the device takes for a step")
    parser.add_argument("--path", default="/v1/completions", help="/v1/completions or /v1/chat/completions")
    parser.add_argument("--transport", default="process", choices=["process", "thread"], help="where the engine runs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)  # a socket: be the engine
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)  # a port: be the client
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    MadeUpTokens.seconds = args.step_ms / 1000
    if args.client:
        print(json.dumps(Client(args.client, args.streams, args.tokens, args.path).run()))
    elif args.engine:
        serve_socket(args.engine, make_fake_engine)
    elif args.offline:
        print(offline(args))
    else:
        uvicorn_loop = uvicorn.Config("", loop="auto").get_loop_factory()
        with asyncio.Runner(loop_factory=uvicorn_loop) as runner:
            runner.run(measure(args))


if __name__ == "__main__":
    main()
