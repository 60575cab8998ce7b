"""Graphs are kept by their width alone: a step with filters replays the graph of one without."""

from __future__ import annotations

from collections.abc import Callable

from folovllm.learn.builders.reference import GraphCache as Right
from folovllm.worker.step_graph import StepGraph


class GraphCache(Right):
    def get(self, width: int, kind: str, capture: Callable[[], StepGraph]) -> StepGraph:
        return super().get(width, "any", capture)
