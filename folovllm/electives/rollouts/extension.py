"""The extension that `batch_invariant=True` asks for: layers and attention whose results do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from folovllm.electives.rollouts.attention import InvariantBackend
from folovllm.electives.rollouts.layers import tiled_layers
from folovllm.engine.extension import Extension
from folovllm.models.model_config import num_experts_of, num_linear_of, windows_of

if TYPE_CHECKING:
    from folovllm.attention.backends.abstract import AttentionBackend
    from folovllm.engine.setup import EngineSetup
    from folovllm.layers.layer_set import LayerSet

# On a GPU torch's log_softmax lets the lanes of a warp add up so many numbers. More are read four at a time, aligned to 16 bytes.
WARP_SOFTMAX = 1024


class BatchInvariance(Extension):
    """A request's logits are the same, bit by bit, alone and in any batch, in chunks, after preemption, with a prefix hit.

    The promise is for one machine, one version of torch and one number of threads.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Raises ValueError for a configuration that cannot keep this promise."""
        super().__init__(setup)
        config, model = setup.config, setup.hf_config
        refused = {
            "kv_cache='growing' computes one request at a time: take milestone m2 or later": config.kv_cache
            == "growing",
            "ranks add up in an order of their own: leave tensor_parallel_size at 1": config.tensor_parallel_size > 1,
            "compile chooses kernels by itself: leave it out": config.compile,
            "K/V in 8 bits are not supported: leave kv_cache_dtype out": setup.attention.is_fp8,
            "builders are not supported: leave them out": bool(config.builder_names),
            "quantized weights are not supported: take another checkpoint": getattr(model, "quantization_config", None),
            "a mixture of experts is not supported: take a dense model": num_experts_of(model),
            "layers of linear attention are not supported: take another model": num_linear_of(model),
            "sliding windows are not supported: take another model": any(windows_of(model)),
            "log-probabilities begin at 16 bytes in each row: take a model with a vocabulary of a multiple of 4 tokens": (
                setup.device.type == "cuda" and setup.vocab_size % 4 and setup.vocab_size > WARP_SOFTMAX
            ),
            "threads must divide a tile: take num_threads 1, 2, 4, ...": not divides_tiles(setup.device),
        }
        if why := next((sentence for sentence, holds in refused.items() if holds), None):
            raise ValueError(f"batch_invariant: {why}")

    def layer_set(self, usual: Callable[[], LayerSet]) -> LayerSet:
        """Return the invariant layers, which count what the usual ones count."""
        return replace(invariant_layers(self.setup), counters=usual().counters)

    def attention_backend(self, usual: Callable[[], AttentionBackend]) -> AttentionBackend:
        return invariant_backend(self.setup)


def divides_tiles(device: torch.device) -> bool:
    """Whether threads share a tile evenly: where one ends inside a vector, its last numbers go through another function."""
    threads = torch.get_num_threads()
    return device.type != "cpu" or (threads & (threads - 1)) == 0


def invariant_layers(setup: EngineSetup) -> LayerSet:
    """Return the layers of a batch-invariant model: Triton kernels if the engine's attention is Triton's, else torch in tiles."""
    if setup.backend == "triton":
        from folovllm.electives.rollouts.kernel_layers import kernel_layers

        return kernel_layers()
    return tiled_layers()


def invariant_backend(setup: EngineSetup) -> AttentionBackend:
    """Return the attention of a batch-invariant model, likewise."""
    if setup.backend == "triton":
        from folovllm.electives.rollouts.kernel_layers import InvariantTritonBackend

        return InvariantTritonBackend(setup.attention)
    return InvariantBackend(setup.attention)
