"""What an engine asks of its devices, one or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from folovllm.step.masks import Masks
from folovllm.step.packed import Int32
from folovllm.step.schedule import SchedulerOutput, StepResult


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
        """Start one step up to its logits, and return at once; `draw` must be what is called next."""

    def draw(self, masks: Masks) -> Pending:
        """Let the step that `forward` started draw. Rows in `masks` may draw only what their mask allows."""


class Run(Protocol):
    """Decode steps that were started together."""

    @property
    def names(self) -> Int32 | None:
        """Names of the tokens that step j draws for its share i, [j, i]: `DraftTokens`. None if they are known already."""

    def wait(self) -> list[StepResult]:
        """Wait for the last step and return what each drew, as `execute_model` of one after the other would."""


class RunsSteps(AsyncExecutor, Protocol):
    """An executor that can start decode steps one behind the other, with no look at the tokens in between."""

    def submit_run(self, outputs: Sequence[SchedulerOutput]) -> Run:
        """Start the steps and return at once. The next run may begin when this one is over.

        Each share is a decode of one token in a row that the device knows; a token that an earlier step of the run draws is
        in flight. ValueError for any other share.
        """
