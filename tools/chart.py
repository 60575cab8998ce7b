"""Draw what `folovllm bench ladder` or `folovllm bench serve` found. It needs matplotlib.

    folovllm bench ladder --save ladder.json
    python tools/chart.py ladder.json ladder.png      # and ladder.svg beside it

A ladder has one panel a figure and one bar a milestone. Servers have throughput against latency, a line for each preset and a
point for each load. Three pictures of the book are made so, from docs/data/; the servers', on a quiet machine, with

    OMP_NUM_THREADS=1 folovllm bench serve --compare m2,m3,m4,m5,m6 --clients 1,4,8,16 --save docs/data/x1_presets_cpu.json
    python tools/chart.py docs/data/x1_presets_cpu.json docs/img/x1_presets.png
    python tools/chart.py docs/data/ladder_h200.json docs/img/ladder_h200.png
    python tools/chart.py rollouts docs/img/x6_rollouts.png  # of docs/data/x6_rollouts.json
    python tools/chart.py first docs/img/first_h200.png      # all that were measured, on one logarithmic axis
"""

from __future__ import annotations

import argparse
import json
from itertools import cycle
from pathlib import Path
from typing import Any

from folovllm.apps.bench.report import Result, Run, device_line, digits, load

DATA = Path(__file__).resolve().parents[1] / "docs/data"
LADDER = {
    "output tokens": "output tokens a second",
    "output tokens a CPU second": "output tokens a CPU second",
    "TTFT median": "time to the first token, ms",
    "TPOT median": "time per output token, ms",
    "longest wait between tokens": "longest wait for a next token, ms",
    "KV memory wasted": "KV cache held and empty, %",
    "of the roofline": "of the roofline, %",
}
SERVING = {
    "TTFT median": "time to the first token, median, ms",
    "TTFT p99": "time to the first token, 99th percentile, ms",
    "ITL p99": "wait between tokens, 99th percentile, ms",
}
GREY, BLUE, ORANGE = "#9ca3af", "#4f6bdc", "#d97706"
BARS = {"mine": ORANGE, "reference": GREY}
LINES = (GREY, ORANGE, "#059669", "#db2777", BLUE, "#111827")
MILESTONES = {
    "m1": "M1 one request at a time", "m2": "M2 continuous batching", "m3": "M3 paged KV cache", "m4": "M4 kernels",
    "m5": "M5 reuse", "m6": "M6 speed and scale",
}  # fmt: skip


def draw(result: Result, path: Path) -> list[Path]:
    """Write the result's chart as PNG, and as SVG beside it.

    Raises:
        ValueError: matplotlib is not installed, or the result is of another benchmark. OSError: a file cannot be written.
    """
    kinds = {"ladder": draw_ladder, "serve": draw_serving}
    if result.benchmark not in kinds or not result.runs:
        raise ValueError("the file is no result of `folovllm bench ladder` or `serve`")
    work, size = result.workload, "requests a load; a point says how many come a second, or how many clients wait"
    if result.benchmark == "ladder":
        size = f"requests, {work['prompt_tokens']:,} prompt and {work['output_tokens']:,} output tokens"
    caption = f"workload {work['name']}: {work['requests']} {size}; commit {result.commit}, {result.date[:10]}"
    return save(kinds[result.benchmark](result), path, f"{device_line(result)}; {caption}")


def subplots(*shape: int, **options: Any) -> Any:
    """matplotlib's figure and axes [rows, columns], without a display. Raises ValueError where it is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError(
            'a chart needs matplotlib: pip install matplotlib, or pip install -e ".[notebooks]"'
        ) from error
    matplotlib.use("Agg")
    matplotlib.rcParams |= {
        "svg.hashsalt": "folovllm",  # the same data gives the same file
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    }  # fmt: skip
    from matplotlib import pyplot

    return pyplot.subplots(*shape, squeeze=False, **options)


def save(figure: Any, path: Path, caption: str = "") -> list[Path]:
    """Write a figure as PNG and as SVG beside it, with a caption below."""
    figure.text(0.005, 0.01, caption, fontsize=6, color="#6b7280")
    figure.tight_layout(rect=(0, 0.05 if caption else 0, 1, 1))
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for file in files:
        figure.savefig(file, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def draw_ladder(result: Result) -> Any:
    """A panel for each figure that any run has."""
    runs = result.runs
    panels = [name for name in LADDER if any(name in run.metrics for run in runs)]
    figure, axes = subplots(1, len(panels), figsize=(2.7 * len(panels), 1.0 + 0.3 * len(runs)), sharey=True)
    colors = [BARS.get(run.name.rpartition(" ")[2], BLUE) for run in runs]
    for axis, name in zip(axes[0], panels, strict=True):
        found = [run.metrics.get(name) for run in runs]
        values = [metric.median if metric else 0.0 for metric in found]
        bars = axis.barh(range(len(runs)), values, color=colors, height=0.7)
        axis.bar_label(bars, [digits(metric.median) if metric else "-" for metric in found], padding=2, fontsize=8)
        axis.set_xlim(0, 1.3 * max(values) or 1)
        axis.set_xticks([])
        axis.set_title(LADDER[name], fontsize=8)
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(length=0)
    axes[0][0].set_yticks(range(len(runs)), [run.title for run in runs])
    axes[0][0].invert_yaxis()
    return figure


def draw_serving(result: Result) -> Any:
    """A line for each preset in each panel; each point says its load."""
    figure, axes = subplots(1, len(SERVING), figsize=(4.2 * len(SERVING), 3.4))
    presets: dict[str, list[Run]] = {}
    for run in result.runs:
        presets.setdefault(run.name.rpartition(" at ")[0], []).append(run)
    for axis, (metric, title) in zip(axes[0], SERVING.items(), strict=True):
        for (name, runs), color in zip(presets.items(), cycle(LINES), strict=False):
            own = [run for run in runs if metric in run.metrics]
            across, up = ([run.metrics[which].median for run in own] for which in ("output tokens", metric))
            axis.plot(across, up, marker="o", markersize=3, linewidth=1.2, color=color, label=name)
            for run, *point in zip(own, across, up, strict=True):
                at = run.name.rpartition(" at ")[2].removesuffix(" clients")
                axis.annotate(at, point, fontsize=5, xytext=(3, 3), textcoords="offset points")
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("output tokens a second", fontsize=8)
        axis.set_yscale("log")
        axis.grid(True, which="both", color="#e5e7eb", linewidth=0.5)
        axis.tick_params(which="both", labelsize=7)
    axes[0][0].legend(fontsize=8)
    return figure


def draw_first() -> Any:
    """A bar for transformers, each milestone, nano-vLLM and vLLM."""
    hf, ladder, nano, vllm = (
        json.loads((DATA / f"{name}_h200.json").read_text()) for name in ("hf", "ladder", "nano_vllm", "beside_vllm")
    )
    speeds = {run["name"]: run["metrics"]["output tokens"]["median"] for run in ladder["runs"]}
    bars = [(f"transformers, {batch} at a time", speed, GREY) for batch, speed in hf["tokens a second"].items()]
    bars += [(title, speeds[name], BLUE) for name, title in MILESTONES.items()]
    best = max(max(call["vLLM"]["output tokens/s, with text"]) for call in vllm["calls"])
    bars += [("nano-vLLM", nano["tokens a second"], GREY), ("vLLM 0.26", best, GREY)]
    names, values, colors = zip(*bars, strict=True)
    figure, [[axis]] = subplots(figsize=(8.5, 0.6 + 0.33 * len(bars)))
    drawn = axis.barh(range(len(bars)), values, color=colors, height=0.7)
    axis.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=3, fontsize=9)
    axis.set_xscale("log")
    axis.set_xlim(10, 120_000)
    axis.set_yticks(range(len(bars)), names)
    axis.invert_yaxis()
    axis.set_xlabel("output tokens a second, 256 requests, Qwen3-0.6B's geometry, one H200 (logarithmic)", fontsize=9)
    axis.tick_params(axis="y", length=0)
    return figure


def draw_rollouts() -> Any:
    """The mean reward of each iteration of the demo, a line for each seed."""
    figure, [[axis]] = subplots(figsize=(7, 3))
    for run in json.loads((DATA / "x6_rollouts.json").read_text()):
        rewards = [each["reward"] for each in run["curve"]]
        axis.plot(range(1, len(rewards) + 1), rewards, "o-", markersize=3, label=f"seed {run['options']['seed']}")
    axis.set_xlabel("iteration", fontsize=9)
    axis.set_ylabel("mean reward of 32 rollouts", fontsize=9)
    axis.legend()
    return figure


def main() -> None:
    """Draw what the command line names, and print the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", help='what `folovllm bench ... --save` wrote, "first" or "rollouts"')
    parser.add_argument("picture", type=Path, help="x.png writes x.png and x.svg")
    given = parser.parse_args()
    try:
        own = {"first": draw_first, "rollouts": draw_rollouts}.get(given.result)
        files = save(own(), given.picture) if own else draw(load(Path(given.result)), given.picture)
    except (OSError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    print(*files, sep="\n")


if __name__ == "__main__":
    main()
