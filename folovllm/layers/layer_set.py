"""The set of layers that a model is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from folovllm.layers.linear import PLAIN, LinearMethod

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
LinearMethodOf = Callable[[str], LinearMethod | None]  # the name of a linear layer -> its method; None: not quantized
Replacements = Mapping[Any, Callable[..., nn.Module]]  # a class of layers -> what makes the layer that replaces it


@dataclass(frozen=True, slots=True)
class LayerSet:
    """Makes a model's layers: `layers.make(RMSNorm, size)` is an `RMSNorm` in M1 (the plain set), and from M4 on one with a kernel.

    Attributes:
        replacements: a class that the model names -> what makes the layer in its place. linear_method: of what is not quantized.
        quantized: X2: each layer's linear method by its name, of a quantized checkpoint. prefix: what is being built.
        kernels: M6: layers should be kernels where there are some, and read nothing on the host: a step may be captured.
        counters: X4: int64 tensors by name in which the model counts as it runs (`ModelRunner.clear_counters`).
        most_samples: X3, X5: tokens that a step may sample of one sequence. Of several (drafts) some may be rejected: the next
            step's `seq_lens` say how many stay.
    """

    replacements: Replacements = field(default_factory=dict)
    linear_method: LinearMethod = PLAIN
    quantized: LinearMethodOf | None = None
    prefix: str = ""
    kernels: bool = False
    counters: dict[str, torch.Tensor] | None = None
    most_samples: int = 1

    def make(self, kind: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
        """Make a layer of this kind, or of the subclass that replaces it; both take the same arguments."""
        layer: M = self.replacements.get(kind, kind)(*args, **kwargs)  # type: ignore[assignment]  # the mapping is by kind
        return layer

    def within(self, name: str) -> LayerSet:
        """Return this set for the parts of a module: `name` is where it is in the model."""
        return replace(self, prefix=f"{name}.")

    def linear_method_of(self, name: str) -> LinearMethod:
        """Return the linear method of a layer by its name within the module that is being built."""
        return (self.quantized and self.quantized(self.prefix + name)) or self.linear_method

    def having(self, replacements: Replacements, linear_method: LinearMethod | None = None) -> LayerSet:
        """Return this set with these replacements too."""
        return replace(
            self, replacements={**self.replacements, **replacements}, linear_method=linear_method or self.linear_method
        )
