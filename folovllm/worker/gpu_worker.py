"""The worker of one device. It owns the runner, which owns the model and its cache."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Generic

import torch

from folovllm.worker.runner import Result, Runner, Step


class GPUWorker(Generic[Step, Result]):
    """Sets the device up, and passes steps to the runner. CUDA keeps the current device per thread, so each call sets it."""

    def __init__(self, device: torch.device, runner: Runner[Step, Result]) -> None:
        self._device = device
        self.runner = runner
        self.num_kv_blocks = 0
        self.state: dict[str, Any] = {}  # what functions of `Executor.collective_rpc` keep between two calls

    def load_model(self) -> None:
        """Load the weights, then allocate the KV cache."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else weights could land in a closed engine's cache, which torch would then never release
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
        """A context in which the worker's device is the current one; a new one each time."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
