"""What ranks say while they start is never lost, whoever listens."""

from __future__ import annotations

from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any, cast

from folovllm.executor.multiproc_executor import Rank
from folovllm.executor.rank import Failure, Ready


def test_readiness_is_remembered_until_it_is_asked_for() -> None:
    """`check` listens to all ranks while one of them is waited for."""
    ours, theirs = Pipe()
    rank = Rank(cast(Any, SimpleNamespace(poll=lambda: None)), ours)
    rank.receive()
    assert rank.ready is None
    ready = Ready(7, [1, 2])
    theirs.send(ready)
    for _ in range(2):
        rank.receive()
        assert rank.ready == ready and not rank.is_dead
    theirs.send(Failure("OSError: gone", "", False, False))
    rank.receive()
    assert rank.is_dead
