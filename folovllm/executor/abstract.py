"""The interface between the engine and its devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from folovllm.step.schedule import SchedulerOutput, StepResult

T = TypeVar("T")


class Pending(Protocol):
    """A step that was started."""

    def wait(self) -> StepResult:
        """Wait for the step's tokens and return them."""


class Executor(Protocol):
    """Runs steps on a device, or on several that share the model."""

    @property
    def num_kv_blocks(self) -> int:
        """Number of blocks (or slots) of the KV cache; 0 where each sequence has its own growing cache."""

    def submit(self, output: SchedulerOutput) -> Pending:
        """Start one step. Raises `NothingScheduled` if it is empty."""

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run one step and wait for its tokens. Raises `NothingScheduled` if it is empty."""

    def collective_rpc(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """Call `function(worker, *arguments)` on every rank, behind all steps so far. Returns the results by rank.

        `function` must be a module's: a rank in another process gets its name. Raises the ValueError that a rank raises.
        """

    def shutdown(self) -> None:
        """Free the model and its cache. A second call does nothing."""
