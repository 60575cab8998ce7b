"""What a worker asks of its runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from folovllm.step.schedule import Extras, Int32

Step = TypeVar("Step")
Result = TypeVar("Result")
StepIn = TypeVar("StepIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class Runner(Protocol[StepIn, ResultOut]):
    """Runs a step, packed or not. It returns the tokens, or a step in flight that will have them."""

    def load_model(self) -> None:
        """Load the weights."""

    def initialize_kv_cache(self) -> int:
        """Allocate the KV cache; returns its number of blocks."""

    def execute_model(self, step: StepIn, /) -> ResultOut:
        """Compute the scheduled tokens and sample the next ones."""


class StepHook(Protocol):
    """X5: works on the device before and after a step that carries extras of its owner, and keeps memory for that (`plugins.STATE_POOL`)."""

    tensors: Sequence[Any]  # its memory

    @property
    def num_bytes(self) -> int:
        """How much memory it is."""

    def load(self, extras: Extras, rows: Sequence[int] | Int32) -> None:
        """Called before a step with these extras. `rows` [S]: those of the scheduled sequences."""

    def save(self, extras: Extras, rows: Sequence[int] | Int32) -> None:
        """Called after such a step."""
