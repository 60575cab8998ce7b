"""One rank: a child process that reads steps from a ring and runs them. Rank 0 sends back the sampled tokens."""

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
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from folovllm.distributed.group import PeersLost, ProcessGroup
from folovllm.engine.setup import EngineSetup
from folovllm.executor.messages import CALL, decode_step, encode_result, longest_messages
from folovllm.executor.packed_executor import PackedWorker
from folovllm.executor.ring import Ring, wait_for
from folovllm.step.schedule import Int32
from folovllm.worker.graph_runner import GraphRunner, PendingStep

# Makes a rank's worker and its runner. It must be a module's function, because it is pickled by its name.
MakeRank = Callable[[EngineSetup, ProcessGroup], tuple[PackedWorker, GraphRunner]]


@dataclass(slots=True, frozen=True)
class Assignment:
    """What the parent sends to a rank that starts."""

    setup: EngineSetup
    rank: int
    rendezvous: Path  # a file through which the ranks find each other
    steps_fd: int
    results_fd: int
    num_threads: int  # of torch, on CPU
    make_rank: MakeRank  # makes the rank's worker


@dataclass(slots=True, frozen=True)
class Answer:
    """What a function returned that a rank was told to call; or the ValueError that it raised.

    A rank's first answer comes unasked, when its weights are loaded and its cache is allocated: the number of KV blocks, and the
    widths of its captured decode steps.
    """

    value: Any
    error: ValueError | None = None


@dataclass(slots=True, frozen=True)
class Failure:
    """A rank's report of the exception that ends it."""

    message: str  # type and text of the exception
    details: str  # its traceback
    is_user_error: bool  # a ValueError, whose sentence says what to do
    is_consequence: bool  # it lost its peers: another rank failed first


def main(fd: int) -> None:
    """Run the rank whose `Assignment` the parent sends through `fd`, until the parent stops it or ends.

    The caller, `folovllm.executor.start`, watches for the parent's end.
    """
    parent = Connection(fd)
    assignment: Assignment = parent.recv()
    try:
        _run(assignment, parent)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        is_consequence = isinstance(error, PeersLost)
        parent.send(Failure(message, traceback.format_exc(), isinstance(error, ValueError), is_consequence))
        os._exit(1)  # a hanging collective would delay a normal exit


def _run(assignment: Assignment, parent: Connection) -> None:
    """Set the rank up, serve steps until the stop message, and end the process."""
    torch.set_num_threads(assignment.num_threads)
    if assignment.rank:
        logging.getLogger("folovllm").setLevel(logging.ERROR)  # rank 0 logs the same
    setup = rank_setup(assignment.setup, assignment.rank)
    store = FileStore(str(assignment.rendezvous), assignment.setup.config.tensor_parallel_size)
    group = ProcessGroup(assignment.rank, assignment.setup.config.tensor_parallel_size, setup.device, store)
    server = RankServer(assignment, setup, group, parent)
    parent.send(Answer((server.worker.num_kv_blocks, server.runner.buckets)))
    server.serve()
    del server  # graphs first, because they use the group
    gc.collect()
    group.close()
    os._exit(0)  # the interpreter's own clean-up would take seconds


def rank_setup(setup: EngineSetup, rank: int) -> EngineSetup:
    """Return the set-up with the rank's own device."""
    device = torch.device("cuda", rank) if setup.device.type == "cuda" else setup.device
    config = setup.config if rank == 0 else replace(setup.config, use_tqdm=False)
    return replace(setup, device=device, config=config, attention=replace(setup.attention, device=device))


class RankServer:
    """Runs the steps that arrive in one ring, and writes results to another. Functions to call come from the parent directly."""

    def __init__(self, assignment: Assignment, setup: EngineSetup, group: ProcessGroup, parent: Connection) -> None:
        longest_step, longest_result = longest_messages(setup)
        self._rank, self._parent = assignment.rank, parent
        self._steps = Ring(assignment.setup.config.tensor_parallel_size, longest_step, assignment.steps_fd)
        self._results = Ring(1, longest_result, assignment.results_fd)
        self._started: deque[PendingStep] = deque()  # rank 0: results not sent yet
        self._spin = spin_seconds(setup)
        self.worker, self.runner = assignment.make_rank(setup, group)
        self.worker.load_model()

    def serve(self) -> None:
        """Run the steps that arrive, until the empty message."""
        while len(message := wait_for(self._next_step, self._spin)):
            if message[0] == CALL:
                self._call()
            elif (pending := self.worker.execute_model(decode_step(message))) is not None and self._rank == 0:
                self._started.append(pending)

    def _call(self) -> None:
        """Call the function that the parent has sent, and send back what it returns."""
        function, arguments = self._parent.recv()
        try:
            self._parent.send(Answer(function(self.worker, *arguments)))
        except ValueError as error:
            self._parent.send(Answer(None, error))

    def _next_step(self) -> Int32 | None:
        """Return the next message, or None if there is none. First send the result of a step that has ended."""
        if self._started and self._started[0].is_here():
            self._results.write(encode_result(self._started.popleft().wait()))
        return self._steps.read(self._rank)


def spin_seconds(setup: EngineSetup) -> float:
    """Return how many seconds to poll for a message without a pause: longer than a GPU's step, and 0 on a CPU."""
    return 0.02 if setup.device.type == "cuda" else 0.0
