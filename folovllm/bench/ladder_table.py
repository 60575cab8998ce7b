"""Show the ladder as a table of 80 columns, and say what its headings mean and what a reader might misread."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from folovllm.bench.report import Result, Run, digits, machine_line, workload_line
from folovllm.bench.throughput import AGREEMENT, LONGEST_GAP, PER_CPU_SECOND, REUSED, ROOFLINE, WASTE

RATE = "output tokens"
COLUMNS = {  # a metric and its heading
    RATE: "output",
    PER_CPU_SECOND: "a CPU\nsecond",
    "sequences a step": "at\nonce",
    "TTFT median": "first\ntoken",
    "TPOT median": "each\ntoken",
    LONGEST_GAP: "longest\nwait",
    WASTE: "cache\nempty",
    REUSED: "prompt\nfound",
    ROOFLINE: "of the\nroofline",
    AGREEMENT: "same\ntokens",
}
LEGEND = (
    "At once: requests in a step, mean. First and each token: medians, with all waiting. Longest wait: of a running "
    "request for its next token. Cache empty: reserved, and nothing in it. Prompt found: in the cache, not computed."
)
FOR_GPUS = "On a CPU M4 runs what M3 runs, and M6 has no device to overlap with: both are for GPUs."


def show_ladder(result: Result, console: Console | None = None) -> None:
    """Print a row for each rung. The ratio compares its tokens a second with the first rung's."""
    console = console or Console(highlight=False)
    title = f"bench ladder: {workload_line(result.workload)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("")
    columns = [name for name in COLUMNS if _is_worth_a_column(name, result)]
    for name in columns:
        unit = next(run.metrics[name].unit for run in result.runs if name in run.metrics)
        table.add_column(f"{COLUMNS[name]}\n{unit}", justify="right", no_wrap=True, vertical="bottom")
        if name == RATE:
            table.add_column("", justify="right", style="bold", no_wrap=True)
    for run in result.runs:
        table.add_row(*_cells(run, result.runs[0], columns))
    console.print(table)
    for note in notes(result):
        console.print(note, style="dim", markup=False)
    console.print(machine_line(result), style="dim", soft_wrap=True)


def _is_worth_a_column(name: str, result: Result) -> bool:
    """Whether any run has this figure. Agreement is worth a column only where it is not 100%: else a note says it."""
    return any(name in run.metrics for run in result.runs) and not (name == AGREEMENT and all_agree(result))


def all_agree(result: Result) -> bool:
    """Whether answers were compared, and all were the first's."""
    found = [run.metrics[AGREEMENT].median for run in result.runs if AGREEMENT in run.metrics]
    return bool(found) and min(found) == 100


def notes(result: Result) -> list[str]:
    """Explain the headings, say what all rungs have in common, and what a CPU cannot show."""
    found = [LEGEND] + ["All rungs gave the same tokens."] * all_agree(result)
    on_cpu = all(PER_CPU_SECOND in run.metrics for run in result.runs)
    if on_cpu and any(run.config.get("milestone") in ("m4", "m6") for run in result.runs):
        found.append(FOR_GPUS)
    return found


def _cells(run: Run, first: Run, columns: list[str]) -> list[str]:
    rate, base = run.metrics[RATE].median, first.metrics[RATE].median
    cells = [digits(run.metrics[name].median) if name in run.metrics else "-" for name in columns]
    return [run.title, cells[0], f"{rate / base:.2f}x" if base else "", *cells[1:]]
