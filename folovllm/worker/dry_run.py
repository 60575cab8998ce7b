"""A dry run of the start over a few layers: all its kernels are compiled at once, before one of them is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from folovllm.models.llama import LlamaModel
from folovllm.setup import EngineSetup


def compile_at_once(setup: EngineSetup, model: LlamaModel, work: Callable[[], None]) -> None:
    """Compile the kernels that `work` launches, on a GPU; it must not need their results.

    A kernel that is missed, say because layers of one kind differ after all, is compiled when it is first launched.
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
    """Within this, `model` has one of all the layers that ask for the same kernels, and the last, of which less is read."""
    whole = model.layers
    model.layers = nn.ModuleList([*{kind_of(layer): layer for layer in whole[:-1]}.values(), whole[-1]])
    try:
        yield
    finally:
        model.layers = whole


def kind_of(layer: nn.Module) -> tuple[object, ...]:
    """What a layer is made of: layers of the same kind ask for the same kernels."""
    modules = ((type(m), type(getattr(m, "format", None)), getattr(m, "window", None)) for m in layer.modules())
    return *modules, *((weight.dtype, weight.shape) for weight in layer.parameters())
