"""A graph cache: a step gets a graph of its own width and kind, captured by itself, with work that needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.builders.engines import assert_same_tokens


@dataclass(eq=False)
class Graph:
    """A graph that replays nothing: it knows its width and its kind."""

    width: int
    kind: str


class CaptureCounter:
    """Counts what is captured."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache
        self.captured: list[tuple[int, str]] = []

    def get(self, width: int, kind: str) -> Graph:
        def capture() -> Graph:
            self.captured.append((width, kind))
            return Graph(width, kind)

        graph: Graph = self.cache.get(width, kind, capture)
        return graph


def test_a_worked_case(component: Any) -> None:
    """At the first need a graph is captured, at the second it is there; another kind at that width is another graph."""
    cache = component(8)
    counter = CaptureCounter(cache)
    plain = counter.get(cache.widths[-1], "plain")
    assert (plain.width, plain.kind) == (8, "plain") and counter.captured == [(8, "plain")], (
        "captured when first needed"
    )
    assert counter.get(8, "plain") is plain and len(counter.captured) == 1, "the second time it is kept"
    assert counter.get(8, "special").kind == "special", "the draw of special rows is other work: a graph of its own"
    assert len(cache) == 2, "len() is the number of graphs that are kept"


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 16, 100, 256])
def test_widths(component: Any, most: int) -> None:
    widths = list(component(most).widths)
    assert widths == sorted(set(widths)), "widths ascend, each once"
    assert widths[0] >= 1 and widths[-1] == most, (
        "the last is max_num_seqs, so that every batch finds one that holds it"
    )


def test_few_widths_and_little_padding(component: Any) -> None:
    """Both cost: a graph takes time to capture and memory, a row of padding is computed for nothing."""
    widths = list(component(256).widths)
    assert len(widths) <= 64, f"{len(widths)} widths are many to capture"
    padded = [next(width for width in widths if width >= rows) for rows in range(1, 257)]
    assert all(width <= max(4, 2 * rows) for rows, width in enumerate(padded, 1)), (
        "at most as many rows again as padding"
    )


def test_each_gets_its_own_graph(component: Any) -> None:
    """Over and over, more of them than some caches keep."""
    cache = component(256)
    counter = CaptureCounter(cache)
    for _ in range(3):
        for width in cache.widths:
            for kind in ("plain", "special", "forward", "draw"):
                graph = counter.get(width, kind)
                assert (graph.width, graph.kind) == (width, kind), "a graph replays the shapes and the work it captured"


def test_what_is_used_all_the_time_is_kept(component: Any) -> None:
    """A server that stays at one width captures once, whatever comes in between now and then."""
    cache = component(256)
    counter = CaptureCounter(cache)
    often = cache.widths[len(cache.widths) // 2]
    for width in cache.widths:
        for kind in ("plain", "special", "forward", "draw"):
            counter.get(width, kind)
            counter.get(often, "plain")
    assert counter.captured.count((often, "plain")) == 1, "the graph of every other step was thrown away"


def test_the_cache_says_how_much_it_keeps(component: Any) -> None:
    cache = component(64)
    counter = CaptureCounter(cache)
    assert len(cache) == 0, "nothing is captured before it is asked for"
    for n, width in enumerate(cache.widths[:4], 1):
        counter.get(width, "plain")
        assert len(cache) == min(n, len(counter.captured)), "each new graph counts"


def test_two_caches_share_nothing(component: Any) -> None:
    one, other = CaptureCounter(component(8)), CaptureCounter(component(8))
    assert one.get(8, "plain") is not other.get(8, "plain"), (
        "graphs write to the memory of the engine that captured them"
    )


def test_in_the_engine(component: Any) -> None:
    assert_same_tokens("graph_cache", milestone="m6", max_num_seqs=5)
