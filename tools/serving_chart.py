"""Draw what `folovllm bench serve` found: a line for each preset, a point for each load, throughput against latency.

folovllm bench serve --compare m2,m3,m4,m5,m6 --rates 1,2,4,8 --save serving.json
python tools/serving_chart.py serving.json serving.png     # and serving.svg beside it; needs matplotlib
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from ladder_chart import draw_as_told, plotting, save

from folovllm.bench.report import Result, Run, device_line

PANELS = (
    ("TTFT median", "time to the first token, median, ms"),
    ("TTFT p99", "time to the first token, 99th percentile, ms"),
    ("ITL p99", "wait between tokens, 99th percentile, ms"),
)
COLORS = ("#9ca3af", "#d97706", "#059669", "#db2777", "#4f6bdc", "#111827")


def draw_serving(result: Result, path: Path) -> list[Path]:
    """Write the chart as PNG and as SVG beside it.

    Raises:
        ValueError: matplotlib is not installed, a file cannot be written, or the result holds no sweep.
    """
    names = list(dict.fromkeys(run.name.rpartition(" at ")[0] for run in result.runs))
    if result.benchmark != "serve" or not names:
        raise ValueError("the file is no result of `folovllm bench serve`")
    pyplot = plotting()
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 3.4), squeeze=False)
    for axis, (metric, title) in zip(axes[0], PANELS, strict=True):
        for name, color in zip(names, COLORS * len(names), strict=False):
            _draw_line(
                axis, [run for run in result.runs if run.name.rpartition(" at ")[0] == name], metric, name, color
            )
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("output tokens a second", fontsize=8)
        axis.set_yscale("log")
        axis.grid(True, which="both", color="#e5e7eb", linewidth=0.5)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    axes[0][0].legend(fontsize=8, frameon=False)
    return save(figure, path, _caption(result))


def _draw_line(axis: Any, runs: list[Run], metric: str, name: str, color: str) -> None:
    """The points in the order of their loads; each says its load."""
    points = [run for run in runs if metric in run.metrics]
    across = [run.metrics["output tokens"].median for run in points]
    up = [run.metrics[metric].median for run in points]
    axis.plot(across, up, marker="o", markersize=3, linewidth=1.2, color=color, label=name)
    for run, x, y in zip(points, across, up, strict=True):
        axis.annotate(run.name.rpartition(" at ")[2], (x, y), fontsize=5, xytext=(3, 3), textcoords="offset points")


def _caption(result: Result) -> str:
    work = result.workload
    return (
        f"{device_line(result)}; workload {work['name']}: {work['requests']} requests a load; the point says how many come a "
        f"second; commit {result.commit}, {result.date[:10]}"
    )


def main() -> None:
    draw_as_told(__doc__, "serve", draw_serving)


if __name__ == "__main__":
    main()
