"""The executor of several devices: a child process for each rank. Steps go through shared memory."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from folovllm.distributed.children import import_path, python_command
from folovllm.distributed.group import child_environment
from folovllm.engine.setup import EngineSetup
from folovllm.executor.abstract import T
from folovllm.executor.messages import CALL, STOP, decode_result, encode_step, longest_messages, plain
from folovllm.executor.packed_executor import PackedExecutor
from folovllm.executor.rank import Answer, Assignment, Failure, MakeRank, spin_seconds
from folovllm.executor.ring import Ring, wait_for
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.packed import PackedStep
from folovllm.step.schedule import Int32

GRACE = 5.0  # seconds that ranks have to end by themselves
FAILURE_TIMEOUT = 1.0  # seconds to wait for the rank that failed first, after another one reported lost peers


class WorkerDied(RuntimeError):
    """A rank has ended, so the engine is unusable: make a new one. The message names the rank and its exception."""


@dataclass(slots=True)
class Rank:
    """A child process, as its parent sees it."""

    process: subprocess.Popen[bytes]
    connection: Connection
    failure: Failure | None = None
    answer: Answer | None = None  # to the last call; at first, that the rank is ready

    def receive(self) -> None:
        """Store the reports of the rank that have arrived."""
        try:
            while self.connection.poll():
                report = self.connection.recv()
                self.answer = report if isinstance(report, Answer) else self.answer
                self.failure = report if isinstance(report, Failure) else self.failure
        except (EOFError, OSError):  # the rank has ended; its exit code says how
            return

    @property
    def is_dead(self) -> bool:
        """Whether the rank has ended or is about to end."""
        return self.failure is not None or self.process.poll() is not None


class Rendezvous:
    """A file through which the ranks find each other.

    On Linux it has no name, so the system frees it when its last user ends. Elsewhere it is a temporary file.
    """

    def __init__(self) -> None:
        self._is_named = not hasattr(os, "memfd_create")
        if self._is_named:
            self.fd, name = tempfile.mkstemp(prefix="folovllm-")
        else:
            self.fd = os.memfd_create("folovllm-rendezvous")
            name = f"/proc/self/fd/{self.fd}"
        self.path = Path(name)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            if self._is_named:
                self.path.unlink()


class Ranks:
    """All ranks of one engine, from their start to their end."""

    def __init__(self, setup: EngineSetup, make_rank: MakeRank) -> None:
        self._make_rank = make_rank
        self.size = setup.config.tensor_parallel_size
        longest_step, longest_result = longest_messages(setup)
        self.steps, self.results = Ring(self.size, longest_step), Ring(1, longest_result)
        self._rendezvous = Rendezvous()
        self._ranks: list[Rank] = []
        self._error: WorkerDied | ValueError | None = None
        self._is_started = False
        self._owner = os.getpid()
        try:
            for rank in range(self.size):
                self._ranks.append(self._start(setup, rank))
            self.ready = self._answers()
            self._is_started = True
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [rank.process.pid for rank in self._ranks]

    def check(self) -> None:
        """If a rank has ended, end the others and raise `WorkerDied`, or the ValueError because of which a rank could not start."""
        if self._error is None:
            for rank in self._ranks:
                rank.receive()
            if any(rank.is_dead for rank in self._ranks):
                self._error = self._cause()
                self.kill()
        if self._error is not None:
            raise self._error

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        """Send a function to all ranks, which were told to expect it, and wait for what it returns. Raises its ValueError."""
        for rank in self._ranks:
            rank.answer = None
            rank.connection.send((function, arguments))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Wait for the answer of each rank, and return the values. Raises the ValueError of the first rank that has one."""
        answers = [wait_for(partial(self._answer, rank), 0.0, self.check) for rank in self._ranks]
        for answer in answers:
            if answer.error is not None:
                raise answer.error
        return [answer.value for answer in answers]

    def _answer(self, rank: Rank) -> Answer | None:
        rank.receive()
        return rank.answer

    def stop(self) -> None:
        """End all ranks: wait for them to finish, and kill those that do not. Does nothing in a fork of the parent."""
        if os.getpid() != self._owner:
            return
        if self._ranks and self._error is None and self.steps.has_room():
            self.steps.write(STOP)
            deadline = time.monotonic() + GRACE
            while any(rank.process.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
                time.sleep(0.005)
        self._error = self._error or WorkerDied("the engine was closed")
        self.kill()

    def kill(self) -> None:
        """Kill the ranks that still run, and free the shared memory."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
        self._ranks.clear()
        self.steps.close()
        self.results.close()
        self._rendezvous.close()

    def _start(self, setup: EngineSetup, rank: int) -> Rank:
        """Start a process that runs `folovllm.executor.start`, and send it its `Assignment`.

        `multiprocessing` does not serve here: its children import the user's main script once more.
        """
        parent, child = Pipe()
        fds = child.fileno(), self.steps.fd, self.results.fd, self._rendezvous.fd
        command = python_command("folovllm.executor.start", str(child.fileno()))
        environment = child_environment() | {"PYTHONPATH": import_path()}
        process = subprocess.Popen(command, env=environment, pass_fds=fds, stdin=subprocess.DEVNULL)
        child.close()
        threads = max(1, torch.get_num_threads() // self.size)
        parent.send(Assignment(plain(setup), rank, self._rendezvous.path, *fds[1:3], threads, self._make_rank))
        return Rank(process, parent)

    def _cause(self) -> WorkerDied | ValueError:
        """Return the error of the rank that failed first. Ranks that only lost their peers are not the cause."""
        deadline = time.monotonic() + FAILURE_TIMEOUT
        while True:
            is_late = time.monotonic() > deadline
            for rank in self._ranks:
                rank.receive()
            for number, rank in enumerate(self._ranks):
                if rank.failure is not None and (is_late or not rank.failure.is_consequence):
                    return self._error_of(number, rank.failure)
            for number, rank in enumerate(self._ranks):
                code = rank.process.poll()
                rank.receive()  # once more, for its last report
                if rank.failure is None and code is not None:
                    how = f"with exit code {code}" if code >= 0 else f"killed by signal {-code}"
                    return WorkerDied(f"rank {number} (process {rank.process.pid}) ended without a report, {how}")
            time.sleep(0.01)

    def _error_of(self, number: int, failure: Failure) -> WorkerDied | ValueError:
        if failure.is_user_error and not self._is_started:
            return ValueError(failure.message.partition(": ")[2])
        return WorkerDied(f"rank {number} failed with {failure.message}\n\n{failure.details}")


class MultiprocExecutor(PackedExecutor):
    """Sends each packed step to all ranks through shared memory. Rank 0 sends back the sampled tokens."""

    def __init__(self, setup: EngineSetup, make_rank: MakeRank) -> None:
        """Start the ranks and wait until all are ready. Raises `WorkerDied`, or ValueError for what a rank cannot serve."""
        self._ranks = Ranks(setup, make_rank)
        self._end = weakref.finalize(self, self._ranks.stop)
        self._spin = spin_seconds(setup)
        self._num_results = 0  # requested so far
        num_kv_blocks, buckets = zip(*self._ranks.ready, strict=True)
        super().__init__(setup.max_num_seqs, min(num_kv_blocks), buckets[0])

    @property
    def pids(self) -> list[int]:
        """Return the process ids by rank; none after the ranks have ended."""
        return self._ranks.pids

    def collective_rpc(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        self._write(CALL)
        return self._ranks.call(function, arguments)

    def shutdown(self) -> None:
        self._end()

    def _send(self, step: PackedStep | TokenBitmasks) -> RemoteStep | None:
        self._write(encode_step(step))
        if isinstance(step, PackedStep) and step.defers_sampling:
            return None
        self._num_results += 1
        return RemoteStep(self._ranks, self._num_results - 1, self._spin)

    def _write(self, message: Int32) -> None:
        """Send a message to all ranks. Raises `WorkerDied` if one of them has ended."""
        if not self._ranks.pids:
            self._ranks.check()
        steps = self._ranks.steps
        wait_for(lambda: steps.has_room() or None, self._spin, self._ranks.check)
        steps.write(message)


class RemoteStep:
    """A step that was sent to the ranks."""

    def __init__(self, ranks: Ranks, number: int, spin: float) -> None:
        self._ranks = ranks
        self._number = number
        self._spin = spin

    def wait(self) -> Any:
        """Wait for the result from rank 0 and return it: a `StepResult` or what was asked. Raises `WorkerDied` if a rank has ended."""
        results, number = self._ranks.results, self._number
        return decode_result(wait_for(lambda: results.read(0, number), self._spin, self._ranks.check))
