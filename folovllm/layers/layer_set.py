"""The set of layers that a model is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from torch import nn

from folovllm.layers.formats.abstract import WeightFormat
from folovllm.layers.linear import PLAIN

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)
Stand = Mapping[Any, Callable[..., nn.Module]]  # a class of layers -> what makes the layer that stands in its place


@dataclass(frozen=True, slots=True)
class LayerSet:
    """A model asks this set for each of its layers, and for the format of its weights. Layers never change their kind.

    The plain set makes every layer of the class that the model names: torch, and weights as checkpoints have them.
    """

    places: Stand = field(default_factory=dict)
    format: WeightFormat = PLAIN

    def make(self, kind: Callable[P, M], *args: P.args, **kwargs: P.kwargs) -> M:
        """Make a layer of this kind, or of the subclass that stands in its place; both take the same arguments."""
        layer: M = self.places.get(kind, kind)(*args, **kwargs)  # type: ignore[assignment]  # the mapping is by kind
        return layer

    def having(self, places: Stand, format: WeightFormat | None = None) -> LayerSet:
        """Return this set with other layers in these places."""
        return replace(self, places={**self.places, **places}, format=format or self.format)
