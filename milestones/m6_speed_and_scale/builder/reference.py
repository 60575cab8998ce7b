"""A graph cache whose widths grow by a quarter, and which forgets what was not used for longest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from folovllm.worker.step_graph import GraphStore, StepGraph

KEPT = 32  # graphs at most


class GraphCache(GraphStore):
    """So a step is padded by a quarter of its rows at most, whatever the batch."""

    def __init__(self, max_num_seqs: int) -> None:
        self.widths = [1]
        while self.widths[-1] < max_num_seqs:
            self.widths.append(min(max_num_seqs, self.widths[-1] + max(1, self.widths[-1] // 4)))
        self._graphs: OrderedDict[tuple[int, str], StepGraph] = OrderedDict()  # least recently used first

    def get(self, width: int, kind: str, capture: Callable[[], StepGraph]) -> StepGraph:
        """The graph that is kept, or a new one in the place of the one that was not used for longest."""
        graph = self._graphs.pop((width, kind), None)
        if graph is None:
            if len(self._graphs) == KEPT:
                self._graphs.popitem(last=False)
            graph = capture()
        self._graphs[width, kind] = graph
        return graph

    def __len__(self) -> int:
        return len(self._graphs)
