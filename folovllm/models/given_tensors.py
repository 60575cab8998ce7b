"""Weights that are given as tensors, and checked as those of a file are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from folovllm.layers.linear import PLAIN, LinearMethod
from folovllm.models.extra_tensors import LinearMethods, Shard, is_ignored
from folovllm.models.messages import printable, torch_names


def given_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
    linear_methods: LinearMethods,
    shard: Shard | None,
    local_tensors: Callable[..., Iterable[tuple[str, torch.Tensor]]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield our names and tensors (with `shard` the rank's parts) of tensors in memory. ValueError: one cannot be used."""
    for given_name, given in map(as_named, tensors):
        for name, tensor in local_tensors(given_name, given):
            if not is_ignored(name, linear_methods):
                said = given_name if tensor is given else name
                require_usable(said, tensor, linear_methods.get(name.rpartition(".")[0], PLAIN))
            yield name, tensor if shard is None else shard(name, tensor)


def as_named(given: Any) -> tuple[str, torch.Tensor]:
    """Return a name and what should be its tensor. Raises ValueError if this is no such pair."""
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[0], str):
        raise ValueError(
            f"the given set of weights must hold pairs of a name and a tensor, not {printable(repr(given), 100)}"
        )
    if not isinstance(given[1], torch.Tensor):
        raise ValueError(f"{given[0]!r} is a {type(given[1]).__name__}, and must be a tensor")
    return given[0], given[1]


def require_usable(name: str, tensor: torch.Tensor, linear_method: LinearMethod) -> None:
    """Raise ValueError if a given weight holds no numbers, or other ones than its linear method takes."""
    if tensor.layout != torch.strided:
        raise ValueError(f"{name!r} is sparse, and must be a tensor of all its numbers")
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the device meta, where a tensor holds no numbers")
    wanted, dtype = torch_names(linear_method.stored(name.rpartition(".")[2])), str(tensor.dtype).removeprefix("torch.")
    if dtype not in wanted:
        raise ValueError(f"{name!r} holds numbers of {dtype}, and the model takes {' or '.join(wanted)}")
