"""One device: it owns the runner, which owns the model and its cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch

Step = TypeVar("Step")
Result = TypeVar("Result")
StepIn = TypeVar("StepIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)


class Runner(Protocol[StepIn, ResultOut]):
    """Turns a step, packed or not, into tokens, or into a step under way that will have them."""

    def load_model(self) -> None:
        """Load the weights."""

    def initialize_kv_cache(self) -> int:
        """Allocate the KV cache; returns its number of blocks."""

    def execute_model(self, step: StepIn, /) -> ResultOut:
        """Compute the scheduled tokens and sample the next ones."""


class GPUWorker(Generic[Step, Result]):
    """Sets the device up, and passes steps to the runner.

    Which device is the current one belongs to a thread, so each call says it anew: an engine may be built in one thread
    and stepped in another, and two engines may have a device each.
    """

    def __init__(
        self, device: torch.device, runner: Runner[Step, Result], counters: dict[str, torch.Tensor] | None = None
    ) -> None:
        """`counters`: what the model counts in as it runs, if it does (`LayerSet.counters`)."""
        self._device = device
        self.runner = runner
        self._counters = counters
        self.num_kv_blocks = 0

    def load_model(self) -> None:
        """Load the weights, then give the KV cache its memory.

        torch keeps what was freed. Weights that did not fit elsewhere would lie in what was the cache of an engine that is
        closed, one piece, and none of the rest could be given back to the card, where room for the cache is looked for.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            # On Hopper PyTorch would ask cuDNN first, which plans 35 ms for every new length of the keys: each token's.
            torch.backends.cuda.enable_cudnn_sdp(False)
        with self.current():
            self.runner.load_model()
            self.num_kv_blocks = self.runner.initialize_kv_cache()
            for counts in (self._counters or {}).values():
                counts.zero_()  # nobody asked for the tokens of the warm-up

    def execute_model(self, step: Step) -> Result:
        """Run one step, or start it, without autograd."""
        with self.current(), torch.inference_mode():
            return self.runner.execute_model(step)

    def expert_load(self) -> list[list[int]]:
        """How often each expert of each layer [L][E] was asked by all steps so far; the host waits for them."""
        assert self._counters is not None, "experts are not counted"
        counts: list[list[int]] = self._counters["experts"].tolist()
        return counts

    @contextmanager
    def current(self) -> Iterator[None]:
        """Within this, the worker's device is the current one."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device):
            yield
