"""Pictures of a mixture of experts, as SVG: which expert each word asks, how the experts share the work, what a batch reads.

They are drawn from what the router said (`milestones.routing`), in the book as in a notebook's cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from milestones.pictures import GREY, INK, RED, WIDTH, Picture, box, svg, text
from milestones.routing import Routing, expected

COLORS = ("#8dd3c7", "#ffe680", "#bebada", "#fb9a8f", "#80b1d3", "#fdb462", "#b3de69", "#fccde5")
LEFT, CELL, HIGH = 62, 21, 17  # the margin with the layers' names; of a cell, how wide at least, and how high


def color(expert: int) -> str:
    """The expert's."""
    return COLORS[expert % len(COLORS)]


def words(routing: Routing) -> Picture:
    """A column a token, a row a layer. The cell has the color and number of the token's first expert; the strip below it, its second's."""
    num_layers, top, x = len(routing.experts), 8.0, float(LEFT)
    parts = [*_names(num_layers, top)]
    for number, piece in enumerate(routing.pieces):
        label = piece.strip() or "\N{OPEN BOX}"
        wide = max(CELL, 7 * len(label) + 8)
        if x + wide > WIDTH - 8:
            top, x = top + 34 + HIGH * num_layers, LEFT
            parts += _names(num_layers, top)
        parts.append(text(x + wide / 2, top + 12, label, size=11, at="middle"))
        for layer in range(num_layers):
            first, *others = routing.experts[layer, number].tolist()
            y = top + 18 + HIGH * layer
            parts.append(box(x, y, wide - 1, HIGH - 1, color(first), "none"))
            parts.append(text(x + wide / 2, y + 10, first, size=9, at="middle"))
            each = (wide - 1) / max(1, len(others))
            parts += [box(x + each * i, y + HIGH - 5, each, 4, color(other), "none") for i, other in enumerate(others)]
        x += wide
    return svg(parts, top + 26 + HIGH * num_layers)


def _names(num_layers: int, top: float) -> Iterable[str]:
    for layer in range(num_layers):
        yield text(LEFT - 6, top + 30 + HIGH * layer, f"layer {layer}", size=10, fill=GREY, at="end")


def load(counts: npt.NDArray[np.int64], ranks: int = 1) -> Picture:
    """A row a layer: each expert's part of all pairs, `counts` [L, E], in whole percent. Dashed: where the parts would end if all were equal.

    With several ranks a thick line stands between the experts of two ranks.
    """
    num_layers, num_experts = counts.shape
    wide, high = WIDTH - LEFT - 12, 26
    parts: list[str] = []
    # Rounded, so that a tie that falls otherwise changes no picture.
    percent = np.round(100 * counts / counts.sum(-1, keepdims=True))
    for row, shares in enumerate(percent / percent.sum(-1, keepdims=True)):
        y = 8 + (high + 6) * row
        parts.append(text(LEFT - 6, y + 17, f"layer {row}", size=10, fill=GREY, at="end"))
        ends = np.cumsum(shares)
        for expert, (share, end) in enumerate(zip(shares.tolist(), ends.tolist(), strict=True)):
            x = LEFT + wide * (end - share)
            parts.append(box(x, y, wide * share, high, color(expert), "white"))
            label = f"{expert}: {100 * share:.0f}%" if share > 0.055 else str(expert) if share > 0.015 else ""
            parts.append(text(x + wide * share / 2, y + 17, label, size=10, at="middle"))
        for rank in range(1, ranks):
            border = LEFT + wide * float(ends[rank * num_experts // ranks - 1])
            parts.append(box(border - 1.5, y - 3, 3, high + 6, INK, "none"))
    bottom = 8 + (high + 6) * num_layers
    for cut in range(1, num_experts):
        x = LEFT + wide * cut / num_experts
        parts.append(f'<line x1="{x:g}" y1="2" x2="{x:g}" y2="{bottom}" stroke="{GREY}" stroke-dasharray="2 4"/>')
    return svg(parts, bottom + 4)


def batch(measured: Mapping[int, float], num_experts: int, asked: int) -> Picture:
    """Experts that a layer reads (dots), over the tokens of a step; the line is the formula."""
    sizes = sorted(measured)
    left, top, wide, high = 60.0, 16.0, WIDTH - 110.0, 200.0

    def at(size: float, experts: float) -> tuple[float, float]:
        return left + wide * float(np.log2(size) / np.log2(sizes[-1])), top + high * (1 - experts / num_experts)

    parts = []
    for experts in range(0, num_experts + 1, 2):
        _, y = at(1, experts)
        parts += [box(left, y, wide, 0.5, "#ddd", "none"), text(left - 8, y + 4, experts, size=11, at="end")]
    curve = [at(n, expected(num_experts, asked, n)) for n in np.geomspace(1, sizes[-1], 80)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in curve)
    parts.append(f'<polyline points="{points}" fill="none" stroke="{GREY}" stroke-dasharray="4 3"/>')
    for size in sizes:
        x, y = at(size, measured[size])
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{RED}"/>')
        parts.append(text(x, top + high + 18, size, size=11, at="middle"))
    parts.append(text(left + wide / 2, top + high + 38, "tokens in the step", size=11, fill=GREY, at="middle"))
    parts.append(text(left, 10, "experts that a layer reads", size=11, fill=GREY))
    return svg(parts, top + high + 46)
