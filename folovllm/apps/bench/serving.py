"""`folovllm bench serve`: loads on servers, one after the other, and what their clients see.

A server is one of our own for each preset, or one that runs already.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from tqdm import tqdm

from folovllm.apps.bench.contenders import Contender, used_settings
from folovllm.apps.bench.http_load import Reply, Server
from folovllm.apps.bench.report import Metric, Result, Run, latencies
from folovllm.apps.bench.workload import BenchRequest, Workload
from folovllm.config import EngineConfig
from folovllm.distributed.children import import_path, python_command

Ask = Callable[[BenchRequest], Coroutine[Any, Any, object]]
END = 10.0  # seconds that our server has to end
VOCABULARY = 4_000  # ids that every model has
WARM_UP = 3  # requests


@dataclass(slots=True, frozen=True)
class Point:
    """One load: requests a second that come whether or not others are answered, or clients that ask one after the other."""

    rate: float | None = None
    clients: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.clients} clients"


def arrivals(rate: float, count: int, seed: int = 0) -> list[float]:
    """Seconds at which requests come: a Poisson process, whose gaps are exponential; the first comes at once."""
    rng = random.Random(seed)
    return list(itertools.accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


async def drive(requests: list[BenchRequest], point: Point, ask: Ask) -> None:
    """Ask for all, when the load says so, and wait for all.

    With a rate, a request does not wait for those before it: a server that is too slow sees its queue grow, as it would in
    life. Clients in a closed loop spare it that, each waits for its answer.
    """
    loop, waiting = asyncio.get_running_loop(), iter(requests)

    async def one_after_the_other() -> None:
        for request in waiting:
            await ask(request)

    async with asyncio.TaskGroup() as group:
        if point.rate is None:
            for _ in range(point.clients or 1):
                group.create_task(one_after_the_other())
            return
        start = loop.time()
        for request, time in zip(requests, arrivals(point.rate, len(requests)), strict=True):
            await asyncio.sleep(max(0.0, start + time - loop.time()))
            group.create_task(ask(request))


def figures(replies: list[Reply], begin: float) -> dict[str, Metric]:
    """Figures of those that were answered; rates are over the time from the first request, at `begin`, to the last token."""
    answered = [reply for reply in replies if reply.error is None and reply.times]
    failed = sum(reply.error is not None for reply in replies)
    metrics = {"answered": Metric.of([len(answered)]), "failed": Metric.of([failed], "", False)}
    seconds = max((reply.times[-1] for reply in answered), default=begin) - begin
    if seconds <= 0:
        return metrics
    tokens = sum(reply.num_tokens for reply in answered)
    metrics["requests"] = Metric.of([len(answered) / seconds], "/s")
    metrics["output tokens"] = Metric.of([tokens / seconds], "tok/s")
    metrics["tokens a piece"] = Metric.of([tokens / sum(len(reply.times) for reply in answered)], "", False)
    metrics |= latencies("TTFT", [[reply.ttft for reply in answered]])
    metrics |= latencies("TPOT", [[reply.tpot for reply in answered if reply.num_tokens > 1]])
    return metrics | latencies("ITL", [[gap for reply in answered for gap in reply.gaps]])


def flags_of(fields: dict[str, Any]) -> list[str]:
    """Fields of an `EngineConfig` as flags of the command."""
    flags: list[str] = []
    for name, value in fields.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", str(value)]
    return flags


@contextmanager
def serving(command: list[str], **options: Any) -> Iterator[str]:
    """Run `folovllm serve` by this command and yield the address that it prints. At the end of the block the server ends.

    It has a session of its own, so a Ctrl-C does not reach it: the server ends after its figures are taken. The start has no
    time limit. `options` are further ones of `subprocess.Popen`, which has its streams from here.

    Raises:
        ValueError: it ended without an address; the message has the end of its log.
    """
    options |= {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log, **options) as process:
        try:
            for line in process.stdout or ():
                if address := re.search(r"serving .* at (http://\S+)/v1", line):
                    yield address[1]
                    return
            process.wait()
            log.seek(0)
            raise ValueError(f"folovllm serve did not start: {log.read()[-2000:].strip() or process.returncode}")
        finally:
            process.terminate()
            try:
                process.wait(END)
            except subprocess.TimeoutExpired:
                process.kill()


@dataclass(slots=True)
class Target:
    """A server to load: its name, what a result says of it, and how it is reached. `address` is open while it is loaded."""

    name: str
    settings: dict[str, Any]
    address: AbstractContextManager[str]
    model: str = "model"
    api_key: str | None = None


def own_servers(contenders: list[Contender], engine_process: bool | None = None) -> list[Target]:
    """A server of ours for each; it starts when its address is opened, which raises ValueError where it cannot."""
    targets = []
    for name, fields in contenders:
        flags = flags_of(fields | {"model": None, "engine_process": engine_process})
        model = [fields["model"]] if fields.get("model") else []
        command = python_command("folovllm", "serve", *model, "--port", "0", "--served-model-name", "model", *flags)
        address = serving(command, env=os.environ | {"PYTHONPATH": import_path()})
        targets.append(Target(name, used_settings(EngineConfig(**fields)), address))
    return targets


def server_at(url: str, model: str | None = None, api_key: str | None = None) -> list[Target]:
    """A server that is there; the model is its first one, if none is named. Raises ValueError where none answers."""
    if model is None:
        address = f"{url.rstrip('/').removesuffix('/v1')}/v1/models"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=END) as response:
                model = str(json.load(response)["data"][0]["id"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"no server answers at {address}: {error}") from error
    return [Target(model, {"url": url}, nullcontext(url), model, api_key)]


def sweep(targets: list[Target], workload: Workload, points: list[Point]) -> tuple[Result, bool]:
    """Warm each server up, then one load after the other. Returns what was found, and whether nobody stopped it before the end.

    Raises:
        ValueError: a server answers none of the first requests.
    """
    result = Result("serve", workload.describe())
    with suppress(KeyboardInterrupt):  # the loads before this one count
        for target in targets:
            with target.address as url:
                server = Server(url, target.model, target.api_key)
                warm_up = replace(workload, requests=workload.requests[:WARM_UP])
                first, _ = asyncio.run(load(server, warm_up, Point(clients=1), 1, f"{target.name}, warm-up"))
                if all(reply.error for reply in first):
                    raise ValueError(f"{target.name} answered nothing: {first[0].error}")
                for number, point in enumerate(points, 2):
                    title = f"{target.name} at {point}"
                    found = figures(*asyncio.run(load(server, workload, point, number, title)))
                    result.runs.append(Run(title, target.settings | asdict(point), found))
        return result, True
    return result, False


async def load(server: Server, workload: Workload, point: Point, number: int, title: str) -> tuple[list[Reply], float]:
    """Send the requests with tokens that no load of another number has. Returns the replies, and when it began."""
    requests, replies = workload.for_vocabulary(VOCABULARY, number).requests, list[Reply]()
    begin = asyncio.get_running_loop().time()
    with tqdm(total=len(requests), desc=title, leave=False, dynamic_ncols=True) as bar:

        async def ask(request: BenchRequest) -> None:
            await server.ask(request, workload.temperature, replies)
            bar.update()

        await drive(requests, point, ask)
    return replies, begin
