"""Weights that are given as tensors, and checked as those of a file are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from folovllm.layers.linear import PLAIN, LinearMethod
from folovllm.models.extra_tensors import LinearMethods, Shard, is_ignored

STORED = {  # torch's names of dtypes: safetensors'
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "int8": "I8", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip


def given_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]],
    linear_methods: LinearMethods,
    shard: Shard | None,
    own_name: Callable[[str], str | None],
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `read_tensors`, of tensors in memory."""
    for given_name, tensor in tensors:
        if (name := own_name(given_name)) is not None:
            if not is_ignored(name, linear_methods):
                require_usable(given_name, tensor, linear_methods.get(name.rpartition(".")[0], PLAIN))
            yield name, tensor if shard is None else shard(name, tensor)


def require_usable(name: str, tensor: Any, linear_method: LinearMethod) -> None:
    """Raise ValueError if a given weight is no tensor, holds no numbers, or other ones than its linear method takes."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name!r} is a {type(tensor).__name__}, and must be a tensor")
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the device meta, where a tensor holds no numbers")
    wanted, dtype = linear_method.stored(name.rpartition(".")[2]), str(tensor.dtype).removeprefix("torch.")
    if STORED.get(dtype) not in wanted:
        raise ValueError(f"{name!r} holds numbers of {dtype}, and the model takes {' or '.join(wanted)}")
