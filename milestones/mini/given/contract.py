"""What your engine and the harness agree on. This file is given: the harness has its own copy, so leave it as it is.

An engine is an object with two methods. The harness calls `add` for each request and then `step`, again and again, until
every request has its tokens:

    add(id: str, prompt: list[int], max_tokens: int) -> None      greedy, and exactly `max_tokens` tokens: nothing stops earlier
    step() -> Step                                                compute something, and say what it was

From stage 2 on it also has the attribute `cache`, a torch tensor [L, 2, num_blocks, block_size, Hkv, D] with all K and V, and
from stage 4 on `attend`, the function that it calls for each layer and sequence. The harness poisons the one and counts the other.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """What an engine may use. In stage 2 a block is a slot: `block_size` is the longest text, `num_blocks` is `max_seqs`."""

    num_blocks: int  # blocks in the cache
    block_size: int  # tokens in a block
    max_seqs: int  # sequences that may hold blocks at the same time
    max_tokens: int  # tokens that one step may compute; before stage 5 no prompt is longer


class Step(NamedTuple):
    """What one call of `step` did."""

    work: list[tuple[str, int, int]]  # (id, start, n): this step computes tokens start to start + n of the sequence
    tables: dict[str, list[int]]  # the blocks of every sequence that holds some, during the step; {} before stage 2
    tokens: dict[str, int]  # the new token of each sequence that has one
    preempted: list[str]  # who lost its blocks in this step, and waits again


class Device:
    """Stage 6: a stream, as a GPU has one. It runs what was launched in order, and none of it before somebody reads.

    So what you launch must hold values. A list that you change after the launch has changed when the device looks at it.
    """

    def __init__(self) -> None:
        self.idle = 0  # how often a read left the device with nothing to do
        self._queue: deque[tuple[int, Callable[[], Any]]] = deque()
        self._results: dict[int, Any] = {}
        self._launched = 0

    def launch(self, work: Callable[[], Any]) -> int:
        """Put work behind all that was launched before. Returns its ticket."""
        self._launched += 1
        self._queue.append((self._launched, work))
        return self._launched

    def read(self, ticket: int) -> Any:
        """Wait until the work with this ticket is done. Returns what it returned; a ticket is read once."""
        while ticket not in self._results:
            number, work = self._queue.popleft()
            self._results[number] = work()
        self.idle += not self._queue
        return self._results.pop(ticket)
