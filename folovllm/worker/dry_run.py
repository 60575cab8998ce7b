"""The few layers over which a dry run of the start compiles all kernels, before the first one is launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from folovllm.models.llama import LlamaModel


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
