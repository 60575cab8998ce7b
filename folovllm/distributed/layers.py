"""Sharded twins of the layers that must talk to other ranks. All others do not notice that they are smaller."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.distributed.group import Group
from folovllm.distributed.sharding import local_config, shard_named
from folovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from folovllm.layers.linear import RowParallelLinear
from folovllm.models.llama import LlamaForCausalLM, head_dim_of
from folovllm.models.loader import init_random_weights, load_model
from folovllm.models.registry import build_model
from folovllm.setup import EngineSetup


class ShardedRowLinear(RowParallelLinear):
    """Adds up what the ranks computed from their inputs. Only rank 0 has a bias that is not zero, so it counts once."""

    group: Group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs / size] -> [T, outputs], whole on every rank."""
        return self.group.all_reduce(super().forward(x))


class ShardedEmbedding(VocabParallelEmbedding):
    """Holds rows `rank * len(weight)` to `(rank + 1) * len(weight)` of the embedding."""

    group: Group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, H] in the weight's dtype, whole on every rank.

        Each rank looks up the ids that it holds and gives zeros for the others; the sum over ranks is the embedding.
        No index outside `weight` may be read, not even for a row that is then dropped. It is part of a recorded step:
        nothing may wait for a value, as `x[mask]` does, whose length the host must know.
        """
        local = input_ids - self.group.rank * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill(elsewhere[:, None], 0.0))


class ShardedHead(ParallelLMHead):
    """Logits of the rank's own token ids. Ids that fill the vocabulary up can never be drawn."""

    num_ids: int  # rows of `weight` that belong to a token

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, H] -> [S, V / size]."""
        logits = super().forward(hidden, out)
        logits[:, self.num_ids :] = -torch.inf
        return logits


SHARDED: list[tuple[type[nn.Module], type[nn.Module]]] = [  # the first that fits
    (RowParallelLinear, ShardedRowLinear),
    (ParallelLMHead, ShardedHead),
    (VocabParallelEmbedding, ShardedEmbedding),
]


def parallelize(model: nn.Module, group: Group, vocab_size: int) -> None:
    """Turn the layers of a rank's part of a model into their sharded twins, in place. `vocab_size` is the whole model's."""
    for module in model.modules():
        twin = next((twin for layer, twin in SHARDED if isinstance(module, layer)), None)
        if twin is None:
            continue
        module.__class__ = mixed(twin, type(module))  # type: ignore[arg-type]  # nn.Module's typing hides its hash
        module.group = group  # type: ignore[assignment]
        if isinstance(module, ShardedHead):
            rows = len(module.weight)
            module.num_ids = min(max(vocab_size - group.rank * rows, 0), rows)


@cache  # one class for all layers of a kind
def mixed(twin: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """`twin` on top of `own`, so that what the twin inherits is what the module, perhaps a fused one, did before."""
    return twin if issubclass(twin, own) else type(f"Sharded{own.__name__}", (twin, own), {})


def load_sharded_model(setup: EngineSetup, group: Group) -> LlamaForCausalLM:
    """The rank's part of the model with its weights; of the checkpoint only this part is read.

    `setup` describes the whole model; random weights are those of one rank, cut.
    """
    config: Any = local_config(setup.hf_config, group.size)
    shard = partial(shard_named, head_dim=head_dim_of(setup.hf_config), rank=group.rank, size=group.size)
    model = build_model(config, setup.dtype, setup.device)
    if setup.config.random_weights:
        init_random_weights(model, setup.config.seed, build_model(setup.hf_config, setup.dtype, "meta"), shard)
    else:
        load_model(model, setup.path, use_tqdm=setup.config.use_tqdm and group.rank == 0, shard=shard)
    return model
