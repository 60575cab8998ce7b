"""One rank: a child process that takes steps from a ring and runs them; rank 0 hands back what was sampled."""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from folovllm.distributed.group import PeersLost, ProcessGroup
from folovllm.executor.messages import ASK_LOAD, decode_step, encode_result, load_as_result, longest_messages
from folovllm.executor.ring import Ring, wait_for
from folovllm.setup import EngineSetup
from folovllm.step.packed import Int32, PackedStep
from folovllm.step.schedule import StepResult
from folovllm.step.token_bitmask import TokenBitmasks
from folovllm.worker.gpu_worker import GPUWorker
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.pending_step import PendingStep

# A rank's worker and its runner; a function of a module, since its name is what travels to another process.
MakeRank = Callable[
    [EngineSetup, ProcessGroup], tuple[GPUWorker[PackedStep | TokenBitmasks, PendingStep | None], GraphRunner]
]


@dataclass(slots=True, frozen=True)
class Assignment:
    """What the parent tells a rank when it starts."""

    setup: EngineSetup
    rank: int
    rendezvous: Path  # a file by which the ranks find each other
    steps_fd: int
    results_fd: int
    num_threads: int  # of torch, on CPU
    make_rank: MakeRank  # puts the rank's worker together

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.setup.config.tensor_parallel_size


@dataclass(slots=True, frozen=True)
class Ready:
    """A rank's report: weights are loaded, the cache is there."""

    num_kv_blocks: int
    buckets: list[int]  # widths of the captured decode steps


@dataclass(slots=True, frozen=True)
class Failure:
    """What a rank reports when an exception ends it."""

    message: str  # type and text of the exception
    details: str  # its traceback
    is_user_error: bool  # a ValueError, whose sentence says what to do
    is_consequence: bool  # it only missed another rank


def main(fd: int) -> None:
    """Run the rank that the parent describes through `fd`, until the parent says stop or has ended.

    `folovllm.executor.start`, which calls this, notices when the parent has ended.
    """
    parent = Connection(fd)
    assignment: Assignment = parent.recv()
    try:
        _run(assignment, parent)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        is_consequence = isinstance(error, PeersLost)
        parent.send(Failure(message, traceback.format_exc(), isinstance(error, ValueError), is_consequence))
        os._exit(1)  # no collective may hold up the end


def _run(assignment: Assignment, parent: Connection) -> None:
    """Set the rank up, serve steps until the end, and end the process."""
    torch.set_num_threads(assignment.num_threads)
    if assignment.rank:
        logging.getLogger("folovllm").setLevel(logging.ERROR)  # rank 0 has said it already
    setup = rank_setup(assignment.setup, assignment.rank)
    store = FileStore(str(assignment.rendezvous), assignment.size)
    group = ProcessGroup(assignment.rank, assignment.size, setup.device, store)
    server = RankServer(assignment, setup, group)
    parent.send(Ready(server.worker.num_kv_blocks, server.runner.buckets))
    server.serve()
    del server  # graphs first, for they hold on to the group
    gc.collect()
    group.close()
    os._exit(0)  # the interpreter would take seconds to take itself apart


def rank_setup(setup: EngineSetup, rank: int) -> EngineSetup:
    """Return the set-up with the rank's own device."""
    device = torch.device("cuda", rank) if setup.device.type == "cuda" else setup.device
    config = setup.config if rank == 0 else replace(setup.config, use_tqdm=False)
    return replace(setup, device=device, config=config, attention=replace(setup.attention, device=device))


@dataclass(slots=True, frozen=True)
class AskedLoad:
    """Stands among the steps under way for the question how often each expert was asked by those before it."""

    worker: GPUWorker[PackedStep | TokenBitmasks, PendingStep | None]

    def is_here(self) -> bool:
        """The steps before it are, and so is the answer."""
        return True

    def wait(self) -> StepResult:
        """As numbers."""
        return load_as_result(self.worker.expert_load())


class RankServer:
    """Runs the steps that come through one ring, and hands results back through another."""

    def __init__(self, assignment: Assignment, setup: EngineSetup, group: ProcessGroup) -> None:
        longest_step, longest_result = longest_messages(setup)
        self._rank = assignment.rank
        self._steps = Ring(assignment.size, longest_step, assignment.steps_fd)
        self._results = Ring(1, longest_result, assignment.results_fd)
        self._started: deque[PendingStep | AskedLoad] = deque()  # rank 0: not handed back yet
        self._spin = spin_seconds(setup)
        self.worker, self.runner = assignment.make_rank(setup, group)
        self.worker.load_model()

    def serve(self) -> None:
        """Run steps as they come, until the empty message."""
        while len(message := wait_for(self._next_step, self._spin)):
            pending = (
                AskedLoad(self.worker) if message[0] == ASK_LOAD else self.worker.execute_model(decode_step(message))
            )
            if self._rank == 0 and pending is not None:
                self._started.append(pending)

    def _next_step(self) -> Int32 | None:
        """Return the next message if it is there. Hand back tokens that have arrived meanwhile."""
        if self._started and self._started[0].is_here():
            self._results.write(encode_result(self._started.popleft().wait()))
        return self._steps.read(self._rank)


def spin_seconds(setup: EngineSetup) -> float:
    """Return how long to look for a message without a pause: longer than a GPU's step; not at all on a CPU."""
    return 0.02 if setup.device.type == "cuda" else 0.0
