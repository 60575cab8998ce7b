"""Which widths of a decode step are recorded, and which recordings are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from folovllm.worker.step_graph import StepGraph


class GraphStore(ABC):
    """Keeps recorded decode steps.

    A graph serves steps of one width, its number of rows. A step of fewer rows is padded to the smallest width that holds
    it. At one width there are several kinds of work (the whole step, its logits, its draw), each with a graph of its own.
    """

    widths: list[int]  # ascending, the last one `max_num_seqs`; the driver pads to them, so they stay as they are

    @abstractmethod
    def __init__(self, max_num_seqs: int) -> None:
        """Choose `widths` for batches of 1 to `max_num_seqs` sequences."""

    @abstractmethod
    def get(self, width: int, kind: str, record: Callable[[], StepGraph]) -> StepGraph:
        """The graph of `width` and `kind`. `record()` makes one, which takes time and memory."""

    @abstractmethod
    def __len__(self) -> int:
        """How many graphs are kept now."""


class AllGraphs(GraphStore):
    """Keeps every graph that was ever recorded."""

    def __init__(self, max_num_seqs: int) -> None:
        self.widths = decode_buckets(max_num_seqs)
        self._graphs: dict[tuple[int, str], StepGraph] = {}

    def get(self, width: int, kind: str, record: Callable[[], StepGraph]) -> StepGraph:
        """Record once, and never forget."""
        if (width, kind) not in self._graphs:
            self._graphs[width, kind] = record()
        return self._graphs[width, kind]

    def __len__(self) -> int:
        return len(self._graphs)


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Widths to record: 1, 2, 4, 8, then every 16th, and the largest batch there can be."""
    widths = {1, 2, 4, 8, *range(16, max_num_seqs, 16), max_num_seqs}
    return sorted(width for width in widths if width <= max_num_seqs)
