"""The oldest graph goes, though every other step needs it."""

from __future__ import annotations

from collections.abc import Callable

from folovllm.learn.builders.reference import GraphCache as Right
from folovllm.worker.step_graph import StepGraph


class GraphCache(Right):
    def get(self, width: int, kind: str, capture: Callable[[], StepGraph]) -> StepGraph:
        if (width, kind) in self._graphs:
            return self._graphs[width, kind]
        return super().get(width, kind, capture)
