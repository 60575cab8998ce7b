"""A dry run of the start over a few layers. It compiles all kernels in parallel, before the first one is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from folovllm.engine.setup import EngineSetup
from folovllm.models.llama import LlamaModel


def compile_at_once(setup: EngineSetup, model: LlamaModel, work: Callable[[], None]) -> None:
    """Compile the kernels that `work` launches on a GPU. `work` must not depend on their results.

    A kernel that the dry run misses is compiled at its first launch, for example if layers of one kind differ after all.
    """
    from folovllm.kernels.dry_run import dry_run  # here, for not every machine has Triton

    config = setup.config
    with (
        one_layer_of_each_kind(model),
        torch.inference_mode(),
        dry_run(setup.device, config.tensor_parallel_size, config.use_tqdm),
    ):
        work()


@contextmanager
def one_layer_of_each_kind(model: LlamaModel) -> Iterator[None]:
    """A context in which `model` has one layer of each kind, and the last layer, whose output is read for fewer tokens."""
    whole = model.layers
    model.layers = nn.ModuleList([*{kind_of(layer): layer for layer in whole[:-1]}.values(), whole[-1]])
    try:
        yield
    finally:
        model.layers = whole


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """Return a key of a layer's types and shapes. Layers with the same key launch the same kernels."""
    modules = ((type(m), type(getattr(m, "format", None)), getattr(m, "window", None)) for m in layer.modules())
    return *modules, *((weight.dtype, weight.shape) for weight in layer.parameters())
