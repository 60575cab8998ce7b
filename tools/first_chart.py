"""The first picture of the book: output tokens a second of all that were measured, on one logarithmic axis.

python tools/first_chart.py docs/img/first_h200.png     # from docs/data/*_h200.json; and first_h200.svg beside it
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ladder_chart import plotting, save

DATA = Path(__file__).resolve().parents[1] / "docs/data"
OURS, OTHERS = "#4f6bdc", "#9ca3af"
NAMES = {
    "m1": "M1 one request at a time", "m2": "M2 continuous batching", "m3": "M3 paged KV cache", "m4": "M4 kernels",
    "m5": "M5 reuse", "m6": "M6 speed and scale",
}  # fmt: skip


def rows() -> list[tuple[str, float, str]]:
    """Name, tokens a second and colour of each bar, from the top."""
    hf = _load("hf_h200")["tokens a second"]
    ladder = {run["name"]: run["metrics"]["output tokens"]["median"] for run in _load("ladder_h200")["runs"]}
    vllm = max(max(call["vLLM"]["output tokens/s, with text"]) for call in _load("beside_vllm_h200")["calls"])
    found = [(f"transformers, {batch} at a time", speed, OTHERS) for batch, speed in hf.items()]
    found += [(title, ladder[name], OURS) for name, title in NAMES.items()]
    nano = _load("nano_vllm_h200")["tokens a second"]
    return [*found, ("nano-vLLM", nano, OTHERS), ("vLLM 0.26", vllm, OTHERS)]


def _load(name: str) -> dict:  # type: ignore[type-arg]
    return json.loads((DATA / f"{name}.json").read_text())


def main() -> None:
    path, bars = Path(sys.argv[1]), rows()
    pyplot = plotting()
    figure, axis = pyplot.subplots(figsize=(8.5, 0.6 + 0.33 * len(bars)))
    names, speeds, colors = zip(*bars, strict=True)
    axis.barh(range(len(bars)), speeds, color=colors, height=0.7)
    for row, speed in enumerate(speeds):
        axis.text(speed * 1.08, row, f"{speed:,.0f}", va="center", fontsize=9)
    axis.set_xscale("log")
    axis.set_xlim(10, 120_000)
    axis.set_yticks(range(len(bars)), names)
    axis.invert_yaxis()
    axis.set_xlabel("output tokens a second, 256 requests, Qwen3-0.6B's geometry, one H200 (logarithmic)", fontsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    save(figure, path)


if __name__ == "__main__":
    main()
