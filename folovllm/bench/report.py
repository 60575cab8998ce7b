"""One format for all benchmarks: a JSON file that says what was measured, where and how, and one table."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import folovllm
from folovllm.files import write_whole

FORMAT = 1
PACKAGES = ("torch", "transformers", "triton", "flash-attn", "numpy")


@dataclass(slots=True, frozen=True)
class Metric:
    """A number with its unit; `spread` is the smallest and largest of the repeats that `median` is of."""

    median: float
    spread: tuple[float, float]
    unit: str = ""
    higher_is_better: bool = True

    @classmethod
    def of(cls, values: list[float], unit: str = "", higher_is_better: bool = True) -> Metric:
        """The metric of several repeats."""
        return cls(statistics.median(values), (min(values), max(values)), unit, higher_is_better)


@dataclass(slots=True)
class Run:
    """One engine's figures. `partial`: the time limit came first, so rates are over what was generated until then."""

    name: str
    config: dict[str, Any]
    metrics: dict[str, Metric]
    partial: bool = False

    @property
    def title(self) -> str:
        """The name, for a table or a picture."""
        return self.name + " (partial)" * self.partial


@dataclass(slots=True)
class Result:
    """All that a benchmark found, and what is needed to find it again."""

    benchmark: str
    workload: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    command: str = ""
    commit: str | None = None
    date: str = ""

    def describe_here(self) -> Result:
        """Fill in this machine, these versions, this command."""
        self.machine, self.versions, self.commit = machine() | self.machine, versions(), commit()
        self.command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        return self

    def save(self, path: Path) -> None:
        """Write the file. Raises ValueError where it cannot be written; an older one is as it was then."""
        write_whole(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")


def load(path: Path) -> Result:
    """Read a file that `save` wrote. Raises ValueError if it is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record.pop("format") != FORMAT:
            raise ValueError("another format")
        runs = [
            Run(
                **{
                    **run,
                    "metrics": {k: Metric(**{**m, "spread": tuple(m["spread"])}) for k, m in run["metrics"].items()},
                }
            )
            for run in record.pop("runs")
        ]
        return Result(**record, runs=runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result of `folovllm bench`: {error}") from error


def machine() -> dict[str, Any]:
    """The processor, its cores that we may use, and the GPU if there is one."""
    import torch

    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
    found["torch_threads"] = torch.get_num_threads()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Of Python, of us, and of the packages that decide about speed."""
    found = {"python": platform.python_version(), "folovllm": folovllm.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The checkout's commit, "+" if files differ from it; None outside of a checkout."""
    root = Path(folovllm.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
        )
        clean = (
            subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "folovllm"], cwd=root, check=False).returncode == 0
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("" if clean else "+")


def show(result: Result, console: Console | None = None) -> None:
    """The table: a row a metric, a column a run; beside each further run, its ratio to the first (above 1: better)."""
    console = console or Console(highlight=False)
    table = Table(title=f"bench {result.benchmark}: {workload_line(result.workload)}", title_justify="left")
    table.add_column("")
    for i, run in enumerate(result.runs):
        table.add_column(run.title, justify="right")
        if i:
            table.add_column(f"/ {result.runs[0].name}", justify="right", style="bold")
    for name in dict.fromkeys(name for run in result.runs for name in run.metrics):
        table.add_row(*_row(name, [run.metrics.get(name) for run in result.runs]))
    console.print(table)
    console.print(machine_line(result), style="dim")


def _row(name: str, metrics: list[Metric | None]) -> list[str]:
    known = next(metric for metric in metrics if metric)
    cells = [f"{name} [{known.unit}]".replace(" []", "").replace("[", "\\[")]
    for i, metric in enumerate(metrics):
        cells.append(_number(metric))
        if i:
            cells.append(_ratio(metrics[0], metric))
    return cells


def _number(metric: Metric | None) -> str:
    if metric is None:
        return "-"
    low, high = metric.spread
    text = digits(metric.median)
    return text if low == high else f"{text} ({digits(low)}..{digits(high)})"


def digits(value: float) -> str:
    """Whole from 100 on, else three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _ratio(first: Metric | None, other: Metric | None) -> str:
    if first is None or other is None or not first.median or not other.median:
        return ""
    ratio = other.median / first.median
    return f"{ratio if other.higher_is_better else 1 / ratio:.2f}x"


def workload_line(workload: dict[str, Any]) -> str:
    """Name and size."""
    sizes = f"{workload['prompt_tokens']:,} prompt and {workload['output_tokens']:,} output tokens"
    return f"workload {workload['name']}, {workload['requests']} requests, {sizes}"


def device_line(result: Result) -> str:
    """The GPU, or the processor and how many threads torch had."""
    threads = result.machine.get("torch_threads")
    return result.machine.get("gpu") or f"{result.machine.get('cpu')}, {threads} thread{'s' * (threads != 1)}"


def machine_line(result: Result) -> str:
    """Where, with what, by which command."""
    versions = " ".join(f"{k} {v}" for k, v in result.versions.items() if k in ("torch", "folovllm"))
    return f"{device_line(result)}; {versions}; commit {result.commit}; {result.command}"
