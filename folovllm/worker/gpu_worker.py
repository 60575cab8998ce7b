"""The worker of one device. It owns the runner, which owns the model and its cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch

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


class GPUWorker(Generic[Step, Result]):
    """Sets the device up, and passes steps to the runner.

    CUDA keeps the current device per thread, so each call sets it. An engine may be built in one thread and stepped in
    another, and two engines may use different devices.
    """

    def __init__(self, device: torch.device, runner: Runner[Step, Result]) -> None:
        self._device = device
        self.runner = runner
        self.num_kv_blocks = 0
        self.state: dict[str, Any] = {}  # what functions of `Executor.collective_rpc` keep between two calls

    def load_model(self) -> None:
        """Load the weights, then allocate the KV cache.

        First torch's free memory goes back to the card. Otherwise weights could land in the freed cache of a closed engine,
        which is one piece: then torch could not release the rest of it, and the memory profile would not see it.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            # On Hopper PyTorch prefers cuDNN, which plans 35 ms for every new number of keys, so for every token.
            torch.backends.cuda.enable_cudnn_sdp(False)
        with self.current:
            self.runner.load_model()
            self.num_kv_blocks = self.runner.initialize_kv_cache()

    def execute_model(self, step: Step) -> Result:
        """Run one step, or start it, without autograd."""
        with self.current, torch.inference_mode():
            return self.runner.execute_model(step)

    @property
    def current(self) -> torch.cuda.device | nullcontext[None]:
        """A context in which the worker's device is the current one. It is new each time: torch's may leave with another device."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
