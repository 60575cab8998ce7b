"""What an engine asks of the devices, however many there are."""

from __future__ import annotations

from typing import Protocol

from folovllm.engine.scheduler import SchedulerOutput
from folovllm.sample.sampler import SamplerOutput


class Pending(Protocol):
    """A step that was started."""

    def wait(self) -> SamplerOutput:
        """Its tokens, as soon as they are here."""


class Executor(Protocol):
    """Runs steps on a device, or on several that share the model."""

    @property
    def num_kv_blocks(self) -> int:
        """Pages (or slots) that the KV cache holds; 0 where each sequence grows a cache of its own."""

    def execute_model(self, output: SchedulerOutput) -> SamplerOutput:
        """Run one step; returns a token for each scheduled sequence."""

    def submit(self, output: SchedulerOutput) -> Pending:
        """Start one step and return at once, where that is possible (`async_scheduling`)."""

    def shutdown(self) -> None:
        """Give everything back; twice is once."""
