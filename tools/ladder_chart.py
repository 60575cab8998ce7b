"""Draw a ladder that was measured: one panel a figure, one bar a rung.

folovllm bench ladder --save ladder.json
python tools/ladder_chart.py ladder.json ladder.png     # and ladder.svg beside it; needs matplotlib
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

from folovllm.bench.report import Result, Run, device_line, digits, load
from folovllm.files import write_whole

PANELS = (
    ("output tokens", "output tokens a second"),
    ("output tokens a CPU second", "output tokens a CPU second"),
    ("TTFT median", "time to the first token, ms"),
    ("TPOT median", "time per output token, ms"),
    ("longest wait between tokens", "longest wait for a next token, ms"),
    ("KV memory wasted", "KV cache held and empty, %"),
    ("of the roofline", "of the roofline, %"),
)
COLORS = {"mine": "#d97706", "reference": "#9ca3af"}
PLAIN = "#4f6bdc"


def draw_ladder(result: Result, path: Path) -> list[Path]:
    """Write the chart as PNG and as SVG beside it; panels that no run has a figure for are left out.

    Raises:
        ValueError: matplotlib is not installed, or a file cannot be written.
    """
    pyplot = plotting()
    panels = [panel for panel in PANELS if any(panel[0] in run.metrics for run in result.runs)]
    height = 1.0 + 0.3 * len(result.runs)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(2.7 * len(panels), height), sharey=True, squeeze=False)
    for axis, (metric, title) in zip(axes[0], panels, strict=True):
        _draw_panel(axis, result.runs, metric, title)
    axes[0][0].set_yticks(range(len(result.runs)), [run.title for run in result.runs])
    axes[0][0].invert_yaxis()
    return save(figure, path, _caption(result))


def plotting() -> Any:
    """matplotlib's pyplot, without a display. Raises ValueError where it is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError(
            'a chart needs matplotlib: pip install matplotlib, or pip install -e ".[notebooks]"'
        ) from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "folovllm"  # the same data gives the same file
    import matplotlib.pyplot as pyplot

    return pyplot


def save(figure: Any, path: Path, caption: str = "") -> list[Path]:
    """Write a figure as PNG and as SVG beside it, with a caption below, and close it."""
    figure.text(0.005, 0.01, caption, fontsize=6, color="#6b7280")
    figure.tight_layout(rect=(0, 0.05 if caption else 0, 1, 1))
    files = [path.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        picture, is_svg = BytesIO(), file.suffix == ".svg"
        figure.savefig(picture, format=file.suffix[1:], dpi=150, metadata={"Date": None} if is_svg else None)
        write_whole(file, picture.getvalue())
    plotting().close(figure)
    return files


def draw_as_told(what: str | None, benchmark: str, draw: Callable[[Result, Path], list[Path]]) -> None:
    """Draw the result that the command line names into the file that it names, and print what was written."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help=f"what `folovllm bench {benchmark} --save` wrote")
    parser.add_argument("picture", type=Path, help="x.png writes x.png and x.svg")
    given = parser.parse_args()
    try:
        files = draw(load(given.result), given.picture)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    print(*files, sep="\n")


def _draw_panel(axis: Any, runs: list[Run], metric: str, title: str) -> None:
    values = [run.metrics[metric].median if metric in run.metrics else None for run in runs]
    widest = max([value for value in values if value is not None], default=0) or 1
    axis.barh(range(len(runs)), [value or 0 for value in values], color=[_color(run) for run in runs], height=0.7)
    for row, value in enumerate(values):
        text = "-" if value is None else digits(value)
        axis.text((value or 0) + 0.02 * widest, row, text, va="center", fontsize=8)
    axis.set_xlim(0, 1.3 * widest)
    axis.set_xticks([])
    axis.set_title(title, fontsize=8)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(length=0)


def _color(run: Run) -> str:
    return COLORS.get(run.name.rpartition(" ")[2], PLAIN)


def _caption(result: Result) -> str:
    work = result.workload
    return (
        f"{device_line(result)}; workload {work['name']}: {work['requests']} requests, {work['prompt_tokens']:,} prompt and "
        f"{work['output_tokens']:,} output tokens; commit {result.commit}, {result.date[:10]}"
    )


def main() -> None:
    draw_as_told(__doc__, "ladder", draw_ladder)


if __name__ == "__main__":
    main()
