"""One device: it owns the runner, which owns the model and its cache."""

from __future__ import annotations

from typing import Protocol

import torch

from folovllm.distributed.group import Group
from folovllm.engine.scheduler import SchedulerOutput
from folovllm.engine.setup import EngineSetup
from folovllm.sample.sampler import SamplerOutput
from folovllm.worker.graph_runner import GraphRunner, PendingStep
from folovllm.worker.model_runner import ModelRunner


class Runner(Protocol):
    """What turns a scheduled step into tokens."""

    def load_model(self) -> None:
        """Load the weights."""

    def initialize_kv_cache(self) -> int:
        """Allocate the KV cache; returns its number of pages."""

    def execute_model(self, output: SchedulerOutput) -> SamplerOutput:
        """Compute the scheduled tokens and draw the next ones."""


class GPUWorker:
    """Sets the device up, and passes steps to the runner."""

    def __init__(self, setup: EngineSetup, group: Group | None = None) -> None:
        self._setup = setup
        self.num_kv_blocks = 0
        self.runner = make_runner(setup, group)

    def load_model(self) -> None:
        """Load the weights, then give the KV cache its memory."""
        if self._setup.device.type == "cuda":
            torch.cuda.set_device(self._setup.device)
            # On Hopper PyTorch would ask cuDNN first, which plans 35 ms for every new length of the keys: each token's.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.runner.load_model()
        self.num_kv_blocks = self.runner.initialize_kv_cache()

    def execute_model(self, output: SchedulerOutput) -> SamplerOutput:
        """Run one step without autograd."""
        with torch.inference_mode():
            return self.runner.execute_model(output)

    def submit(self, output: SchedulerOutput) -> PendingStep:
        """Start one step and return at once."""
        if not isinstance(self.runner, GraphRunner):
            raise TypeError(f"{type(self.runner).__name__} cannot start a step without waiting for it")
        with torch.inference_mode():
            return self.runner.submit(output)


def make_runner(setup: EngineSetup, group: Group | None = None) -> Runner:
    """The runner that the configuration asks for; with a group, that of one rank among several."""
    if group is not None:
        from folovllm.distributed.sharded_runner import ShardedRunner

        return ShardedRunner(setup, group)
    if setup.config.model_impl == "hf":
        from folovllm.worker.hf_model_runner import HFModelRunner

        return HFModelRunner(setup)
    if setup.config.kv_cache == "growing":
        from folovllm.worker.serial_model_runner import SerialModelRunner

        return SerialModelRunner(setup)
    return GraphRunner(setup) if setup.config.packed_steps else ModelRunner(setup)
