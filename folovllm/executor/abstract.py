"""What an engine asks of its devices, one or several."""

from __future__ import annotations

from typing import Protocol

from folovllm.step.schedule import SchedulerOutput, StepResult
from folovllm.step.token_bitmask import TokenBitmasks


class Pending(Protocol):
    """A step that was started."""

    def wait(self) -> StepResult:
        """Wait for the step's tokens and return them."""


class Executor(Protocol):
    """Runs steps on a device, or on several that share the model."""

    @property
    def num_kv_blocks(self) -> int:
        """Blocks (or slots) that the KV cache holds; 0 where each sequence grows a cache of its own."""

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run one step. Raises `NothingScheduled` if it is empty."""

    def expert_load(self) -> list[list[int]]:
        """How often each expert of each layer [L][E] was asked by all steps so far, with `count_experts`. It waits for them."""

    def shutdown(self) -> None:
        """Give everything back. A second call does nothing."""


class AsyncExecutor(Executor, Protocol):
    """An executor that can start the next step before the last one has ended."""

    def submit(self, output: SchedulerOutput) -> Pending:
        """Start one step and return at once."""

    def forward(self, output: SchedulerOutput) -> None:
        """Start one step up to its logits, and return at once; `sample` must be what is called next."""

    def sample(self, masks: TokenBitmasks) -> Pending:
        """Let the step that `forward` started sample. Rows in `masks` may sample only what their mask allows."""
