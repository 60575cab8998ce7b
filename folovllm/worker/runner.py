"""What a worker asks of its runner."""

from __future__ import annotations

from typing import Protocol, TypeVar

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
