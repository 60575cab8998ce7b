"""What a checkpoint may hold beside plain, whole weights, and how a GPU gets them: parts for a rank, codes, tensors without a place in the model."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from folovllm.layers.fusable import fusable
from folovllm.layers.linear import PLAIN, LinearMethod, Plain
from folovllm.models.llama import LlamaForCausalLM
from folovllm.plugins import EXTRA_TENSORS, is_installed, named

PIECE = 32 << 20  # bytes that are pinned at a time
IGNORED_SUFFIX = "rotary_emb.inv_freq"  # a constant that old Llama checkpoints carry

LinearMethods = Mapping[str, LinearMethod]  # by the name of a module
# Gives a tensor of this name to its layer; may raise ValueError.
WeightLoader = Callable[[LlamaForCausalLM, str, torch.Tensor], None]
# A tensor's name, and the tensor (or a slice of a file) -> the part to keep, in the model's order.
Shard = Callable[[str, Any], torch.Tensor]


def part_of(
    places: Container[str], linear_methods: LinearMethods, shard: Shard, name: str, tensor: torch.Tensor
) -> torch.Tensor:
    """Return the part of a checkpoint's tensor that `shard` keeps; its linear method knows how the tensor is laid out.

    `places` are the names that the model has a place for. What is ignored, or taken by others, is read whole. Raises ValueError
    for a tensor with too few dimensions.
    """
    module, _, kind = name.rpartition(".")
    if is_ignored(name, linear_methods) or (name not in places and weight_loader_of(name) is not None):
        return tensor
    linear_method = linear_methods[module] if name in places else PLAIN
    try:
        return fusable(linear_method).shard(kind, tensor, partial(shard, name))
    except IndexError as error:
        raise ValueError(f"{name!r} has shape {list(tensor.shape)}, which cannot be cut: {error}") from error


def repacked(name: str, tensor: torch.Tensor, linear_method: LinearMethod, view: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the checkpoint as its place, `view`, takes it; its linear method knows how.

    Codes are put in order where the model is: 30 billion of 4 bits would keep a CPU busy for most of a minute.
    """
    return fusable(linear_method).repack(name.rpartition(".")[2], tensor.to(view.device), view.shape)


def copy_in_pieces(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor of one dimension or more from the host to a GPU, piece by piece through pinned memory.

    While the GPU fetches a piece, all of the host's threads read the next one from its file. Copied whole, one thread of the
    driver would do both.
    """
    rows = max(1, PIECE * len(tensor) // max(1, tensor.nbytes))
    for part, piece in zip(view.split(rows), tensor.split(rows), strict=True):
        part.copy_(piece.to(part.dtype).pin_memory(), non_blocking=True)


def load_extra(
    model: LlamaForCausalLM, tensors: Iterable[tuple[str, torch.Tensor]], linear_methods: LinearMethods
) -> None:
    """Handle tensors for which the model has no place; it has all its weights by then.

    An ignored one is checked, a head must equal the embedding that is the model's head, an elective's loader takes its own,
    an empty bias passes. Raises ValueError for all else, and for a head that differs.
    """
    embedding = model.model.embed_tokens.weight
    for name, tensor in tensors:
        linear_method = linear_methods.get(name.rpartition(".")[0], PLAIN)
        if is_ignored(name, linear_methods):
            fusable(linear_method).check_ignored(name, tensor)
        elif name == "lm_head.weight" and model.lm_head.weight is embedding:
            if not torch.equal(tensor.to(embedding), embedding):
                raise ValueError(f"{name!r} is not the embedding: set tie_word_embeddings to false in config.json")
        elif (load := weight_loader_of(name)) is not None:
            load(model, name, tensor)
        elif not is_empty_bias(name, tensor, linear_method):
            raise ValueError(f"the weights hold {name!r}, for which the model has no place (or had it twice)")


def weight_loader_of(name: str) -> WeightLoader | None:
    """Return what takes a tensor for which the model has no place, such as a scale of an FP8 cache; None if nobody knows it."""
    loaders = (named(place)(name) for place in EXTRA_TENSORS if is_installed(place))
    return next((load for load in loaders if load is not None), None)


def is_ignored(name: str, linear_methods: LinearMethods) -> bool:
    """Whether a checkpoint may hold a tensor that no model here needs."""
    module, _, kind = name.rpartition(".")
    return name.endswith(IGNORED_SUFFIX) or (
        module in linear_methods and kind in fusable(linear_methods[module]).ignores
    )


def is_empty_bias(name: str, tensor: torch.Tensor, linear_method: LinearMethod) -> bool:
    """Whether it is a bias of zeros for a quantized layer that has none, as writers of GPTQ checkpoints leave them."""
    return name.endswith(".bias") and not isinstance(linear_method, Plain) and not tensor.any()
