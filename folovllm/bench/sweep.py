"""Loads on servers, one after the other: our own, a preset at a time, or one that runs already."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from folovllm.bench.contenders import Contender, used_settings
from folovllm.bench.http_load import Server
from folovllm.bench.own_server import own_server
from folovllm.bench.report import Metric, Result, Run, digits, machine_line, workload_line
from folovllm.bench.serving import Load, Point, Slo, drive, shifted
from folovllm.bench.workload import BenchRequest, Workload
from folovllm.config import EngineConfig

VOCABULARY = 4_000  # ids that every model has
WARM_UP = 3  # requests
COLUMNS = (  # heading, metrics in one cell
    ("requests\n/s", ("requests",)),
    ("output\ntok/s", ("output tokens",)),
    ("TTFT ms\nmedian, p99", ("TTFT median", "TTFT p99")),
    ("TPOT ms\nmedian, p99", ("TPOT median", "TPOT p99")),
    ("ITL ms\nmedian, p99", ("ITL median", "ITL p99")),
    ("goodput\n/s", ("goodput",)),
    ("\nfailed", ("failed",)),
)


@dataclass(slots=True)
class Sweep:
    """What is asked of each server: the requests, point by point."""

    workload: Workload
    points: list[Point]
    slo: Slo
    engine_process: bool | None = None

    def run(self, contenders: list[Contender]) -> tuple[Result, bool]:
        """Start a server of our own for each; returns what was found, and whether nobody stopped it before the end."""
        targets = [(name, used_settings(EngineConfig(**fields)), fields) for name, fields in contenders]
        return self._run((name, shown, own_server(fields, self.engine_process)) for name, shown, fields in targets)

    def run_at(self, url: str, model: str | None, api_key: str | None) -> tuple[Result, bool]:
        """The same for a server that is there. Raises ValueError where none answers."""
        model = model or first_model(url, api_key)
        return self._run([(model, {"url": url}, nullcontext(url))], model, api_key)

    def _run(self, targets: Any, model: str = "model", api_key: str | None = None) -> tuple[Result, bool]:
        result = Result("serve", self.workload.describe() | {"slo": str(self.slo)})
        try:
            for name, shown, address in targets:
                with address as url:
                    for load in self._loads(name, Server(url, model, api_key)):
                        settings = shown | {"rate": load.point.rate, "clients": load.point.clients}
                        run = Run(f"{name} at {load.point}", settings, load.metrics(self.slo), load.partial)
                        result.runs.append(run)
                        if load.partial:
                            return result, False
        except KeyboardInterrupt:  # while a server started or ended
            return result, False
        return result, True

    def _loads(self, name: str, server: Server) -> Iterator[Load]:
        """Warm the server up, then a load for each point. Raises ValueError if it answers none of the first requests."""
        first = Load(Point(clients=1))
        self._drive(server, first, shifted(self.workload, 1, VOCABULARY)[:WARM_UP], f"{name}, warm-up")
        if not first.answered and not first.partial:
            raise ValueError(f"{name} answered nothing: {first.first_error}")
        for number, point in enumerate(self.points, 2):
            load = Load(point)
            if not first.partial:
                self._drive(server, load, shifted(self.workload, number, VOCABULARY), f"{name} at {point}")
            load.partial |= first.partial
            yield load

    def _drive(self, server: Server, load: Load, requests: list[BenchRequest], title: str) -> None:
        with progress(title, len(requests)) as step:

            async def ask(request: BenchRequest) -> None:
                await server.ask(request, self.workload.temperature, load.replies)
                step()

            async def all_of_it() -> None:
                load.begin = asyncio.get_running_loop().time()
                await drive(requests, load.point, ask)

            try:
                asyncio.run(all_of_it())
            except KeyboardInterrupt:  # what was answered by then counts
                load.partial = True


@contextmanager
def progress(title: str, total: int) -> Iterator[Any]:
    """A bar on stderr; call what it gives for each request that is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def first_model(url: str, api_key: str | None) -> str:
    """The name of a server's model. Raises ValueError where none can be had."""
    address = url.rstrip("/").removesuffix("/v1") + "/v1/models"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{address} names no model ({error}): is the server there? Else say --model NAME") from error


def show_sweep(result: Result) -> None:
    """A table for each server, with a row for each load."""
    console = Console(highlight=False)
    names = dict.fromkeys(run.name.rpartition(" at ")[0] for run in result.runs)
    console.print(f"bench serve: {workload_line(result.workload)}")
    for name in names:
        runs = [run for run in result.runs if run.name.rpartition(" at ")[0] == name]
        table = Table(title=name, title_justify="left", box=SIMPLE)
        table.add_column("load", no_wrap=True)
        for heading, _ in COLUMNS:
            table.add_column(heading, justify="right", no_wrap=True)
        for run in runs:
            load = run.name.rpartition(" at ")[2] + " (partial)" * run.partial
            table.add_row(load, *(cell([run.metrics.get(name) for name in names]) for _, names in COLUMNS))
        console.print(table)
    if slo := result.workload.get("slo"):
        console.print(f"goodput counts the requests with {slo}", style="dim")
    console.print(machine_line(result), style="dim")


def cell(metrics: list[Metric | None]) -> str:
    """Figures in a table."""
    return ", ".join("-" if metric is None else digits(metric.median) for metric in metrics)
