"""Ranks as threads of this process: the collectives of a group without processes, so that many sizes can be tried."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class ThreadGroup:
    """A `folovllm.distributed.group.ProcessGroup` whose members are threads that share `board`."""

    def __init__(self, rank: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(board)
        self.one_shot_buffers: Any = None
        self._board, self._barrier = board, barrier

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._board[self.rank] = x
        self._barrier.wait()
        everyone = torch.stack(self._board)
        self._barrier.wait()
        return everyone

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x).sum(0)


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What `work` returns on each rank; if one fails, the others do not wait for it."""
    board, barrier = [None] * size, threading.Barrier(size, timeout=60)

    def run(rank: int) -> T:
        try:
            return work(ThreadGroup(rank, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [e for f in futures if (e := f.exception()) and not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
