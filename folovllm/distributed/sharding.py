"""Shards a model over ranks (tensor parallelism; Shoeybi et al. 2019, "Megatron-LM").

A layer computes y = x W^T. Cut along its outputs (columns of W^T), each rank has some of y and needs all of x; cut along
its inputs (rows of W^T), each needs only its part of x, and the ranks' results add up to y. A column cut followed by a
row cut therefore needs nothing in between: one sum after attention and one after the MLP is all that a layer costs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F

from folovllm.models.model_config import head_dim_of, num_experts_of, num_kv_heads_of, num_linear_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


EXPERTS = ".mlp.experts."  # in the name of every tensor of an expert


class Weight(Protocol):
    """A tensor, or a tensor that is still in its file: indexing reads only the indexed part."""

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the whole tensor."""

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """Read and return a part. `index` is an integer, a slice, or a tuple of these."""


def shard_column(weight: Weight, rank: int, size: int) -> torch.Tensor:
    """The rank's outputs of a layer: an equal share of the rows of `weight`, in the order of ranks.

    As in the two below, `weight` may still be in its file: one slice, of no more than what the rank holds, reads it.

    Args:
        weight: [outputs, inputs], or a bias [outputs]; `size` divides the outputs.

    Returns:
        [outputs / size, inputs], or [outputs / size].
    """
    rows = weight.shape[0] // size
    return weight[rank * rows : (rank + 1) * rows]


def shard_row(weight: Weight, rank: int, size: int) -> torch.Tensor:
    """The rank's inputs of a layer: an equal share of the columns of `weight`, in the order of ranks.

    Args:
        weight: [outputs, inputs]; `size` divides the inputs.

    Returns:
        [outputs, inputs / size].
    """
    columns = weight.shape[1] // size
    return weight[:, rank * columns : (rank + 1) * columns]


def shard_qkv(weight: Weight, head_dim: int, rank: int, size: int) -> torch.Tensor:
    """The rank's heads of a query, key or value projection; heads stay whole.

    With at least as many heads as ranks, each rank has an equal share of them. With fewer (the KV heads of grouped-query
    attention), each head lives on `size / heads` neighbouring ranks, those whose query heads read it.

    Args:
        weight: [heads * head_dim, inputs], or a bias [heads * head_dim]; one of `heads` and `size` divides the other.

    Returns:
        [max(1, heads / size) * head_dim, inputs], or a bias likewise.
    """
    heads = weight.shape[0] // head_dim
    count = max(1, heads // size)
    first = rank * heads // size
    return weight[first * head_dim : (first + count) * head_dim]


def shard_vocab(weight: Weight, rank: int, size: int) -> torch.Tensor:
    """The rank's rows of an embedding or head [V, H], filled up with zeros: [vocab_shard_size(V, size), H].

    The last ranks' parts may reach beyond V, or lie there altogether; those rows belong to no token.
    """
    rows = vocab_shard_size(weight.shape[0], size)
    part = weight[min(rank * rows, weight.shape[0]) : min((rank + 1) * rows, weight.shape[0])]
    return F.pad(part, (0, 0, 0, rows - len(part)))


def vocab_shard_size(vocab_size: int, size: int) -> int:
    """Token ids a rank has: V / size rounded up to a multiple of 4, for a block of noise covers four ids."""
    return 4 * -(-vocab_size // (4 * size))


def shard_named(name: str, weight: Weight, head_dim: int, rank: int, size: int) -> torch.Tensor:
    """The rank's part of a tensor, chosen by its name in the checkpoint. All ranks hold tensors without a rule (norms).

    The bias of a layer cut along its inputs belongs to rank 0, and is zero elsewhere: it must enter the sum once.
    """
    leaf, kind = name.split(".")[-2:]
    match leaf:
        case "q_proj" | "k_proj" | "v_proj":
            return shard_qkv(weight, head_dim, rank, size)
        case "gate_proj" | "up_proj":
            return shard_column(weight, rank, size)
        case "o_proj" | "down_proj" if kind == "bias":
            return weight[:] if rank == 0 else torch.zeros_like(weight[:])
        case "o_proj" | "down_proj":
            return shard_row(weight, rank, size)
        case "embed_tokens" | "lm_head":
            return shard_vocab(weight, rank, size)
    return weight[:]


def shard_merged(
    name: str, weight: Weight, hf_config: PretrainedConfig, shard: Callable[[str, Weight], torch.Tensor]
) -> torch.Tensor:
    """The rank's part of a tensor that holds several layers (Phi-3's), each of which `shard` cuts under its own name."""
    query, kv = (n * head_dim_of(hf_config) for n in (hf_config.num_attention_heads, num_kv_heads_of(hf_config)))
    leaf = name.split(".")[-2]
    match leaf:
        case "qkv_proj":
            sizes = {"q_proj": query, "k_proj": kv, "v_proj": kv}
        case "gate_up_proj":
            sizes = dict.fromkeys(("gate_proj", "up_proj"), hf_config.intermediate_size)
        case _:
            return shard(name, weight)
    ends = zip(sizes, accumulate(sizes.values()), strict=True)
    return torch.cat([shard(name.replace(leaf, part), Rows(weight, end - sizes[part], end)) for part, end in ends])


class Rows:
    """Rows `first` to `end` of a weight. This is a `Weight` too: indexing reads only the indexed rows."""

    def __init__(self, weight: Weight, first: int, end: int) -> None:
        self.weight, self.first = weight, first
        self.shape = torch.Size([end - first, *weight.shape[1:]])

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, *others = index if isinstance(index, tuple) else (index,)
        start, stop, _ = rows.indices(self.shape[0])
        span = slice(self.first + start, self.first + stop)
        return self.weight[(span, *others) if others else span]


def local_config(hf_config: PretrainedConfig, size: int, expert_parallel: bool = False) -> PretrainedConfig:
    """Return the configuration of one rank: heads, widths of MLPs and vocabulary are divided by `size`, so that the model's classes build it without knowing about ranks.

    With `expert_parallel` each rank holds some experts whole, instead of a part of each. ValueError says which sizes work.
    """
    check_size(hf_config, size, expert_parallel)
    local = deepcopy(hf_config)
    local.head_dim = head_dim_of(hf_config)  # before the number of heads changes
    local.num_attention_heads = hf_config.num_attention_heads // size
    local.num_key_value_heads = max(1, num_kv_heads_of(hf_config) // size)
    for name, inner in cut_sizes(hf_config, expert_parallel).items():
        setattr(local, name, inner // size)
    local.whole_vocab_size = hf_config.vocab_size
    local.expert_parallel = expert_parallel
    local.vocab_size = vocab_shard_size(hf_config.vocab_size, size)
    return local


def cut_sizes(hf_config: PretrainedConfig, expert_parallel: bool) -> dict[str, int]:
    """The config's fields that give the widths and heads which are cut among the ranks, but for attention's: {name: number}."""
    experts = num_experts_of(hf_config)
    has_own = experts and getattr(hf_config, "moe_intermediate_size", None)
    names = [] if experts and expert_parallel else ["moe_intermediate_size" if has_own else "intermediate_size"]
    shared = experts and getattr(hf_config, "shared_expert_intermediate_size", None)
    names += ["shared_expert_intermediate_size"] * bool(shared)
    names += ["linear_num_key_heads", "linear_num_value_heads"] * bool(num_linear_of(hf_config))
    return {name: getattr(hf_config, name) for name in names}


def check_size(hf_config: PretrainedConfig, size: int, expert_parallel: bool = False) -> None:
    """Raise ValueError unless every rank gets whole heads and the same number of them, and an equal part of the MLPs."""
    heads, kv_heads, experts = hf_config.num_attention_heads, num_kv_heads_of(hf_config), num_experts_of(hf_config)
    cut = cut_sizes(hf_config, expert_parallel)

    def works(n: int) -> bool:
        whole = all(inner % n == 0 for inner in cut.values()) and not (expert_parallel and experts % n)
        return heads % n == 0 and whole and (kv_heads % n == 0 or n % kv_heads == 0)

    if not works(size):
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if works(n))
        parts = [f"{heads} query heads", f"{kv_heads} KV heads"] + [f"{experts} experts"] * expert_parallel
        parts += [f"{name} {number}" for name, number in cut.items()]
        raise ValueError(
            f"tensor_parallel_size {size} cannot split this model, which has {', '.join(parts)}: sizes that work are {sizes}"
        )


def check_gpus(device: torch.device, tensor_parallel_size: int) -> None:
    """Raise ValueError unless each rank of this machine can have a GPU of its own, the ranks' numbers counting from 0."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", tensor_parallel_size))  # under torchrun some are elsewhere
    if device.type != "cuda":
        return
    if device.index:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} takes the first GPUs: device {device} cannot be kept"
        )
    if torch.cuda.device_count() < ranks:
        raise ValueError(
            f"tensor_parallel_size {tensor_parallel_size} needs {ranks} GPUs here, and there are "
            f"{torch.cuda.device_count()}: lower it, or make more visible (CUDA_VISIBLE_DEVICES)"
        )
