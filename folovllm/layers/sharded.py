"""The layers that talk to other ranks. All other layers work unchanged on a part of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from folovllm.distributed.group import ProcessGroup
from folovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from folovllm.layers.fusable import RankSum, fusable
from folovllm.layers.layer_set import LayerSet, Replacements
from folovllm.layers.linear import RowParallelLinear


class ShardedRowLinear(RowParallelLinear):
    """Adds up what the ranks computed from their inputs. Only rank 0 has a bias that is not zero, so it counts once."""

    def __init__(self, *args: Any, group: ProcessGroup) -> None:
        """As for `RowParallelLinear`; `input_size` is the rank's own."""
        super().__init__(*args)
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs / size] -> [T, outputs], whole on every rank."""
        return fusable(self.linear_method).summed(self, x, self.group)


class ShardedEmbedding(VocabParallelEmbedding):
    """Holds rows `rank * len(weight)` to `(rank + 1) * len(weight)` of the embedding."""

    def __init__(self, vocab_size: int, hidden_size: int, *, group: ProcessGroup) -> None:
        """`vocab_size` is the rank's own number of rows."""
        super().__init__(vocab_size, hidden_size)
        self.group = group

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int64 -> [T, H] in the weight's dtype, whole on every rank.

        Each rank looks up the ids that it holds and gives zeros for the others; the sum over ranks is the embedding.
        It calls `all_reduce` once, for a group of one rank as well.
        No index outside `weight` may be read, not even for a row that is then dropped. It is part of a captured step:
        nothing may wait for a value, as `x[mask]` does, whose length the host must know.
        """
        local = input_ids - self.group.rank * len(self.weight)
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill(elsewhere[:, None], 0.0))


class ShardedHead(ParallelLMHead):
    """Logits of the rank's own token ids. Ids that fill the vocabulary up can never be sampled."""

    def __init__(self, vocab_size: int, hidden_size: int, *, group: ProcessGroup, num_ids: int) -> None:
        """`vocab_size` is the rank's own number of rows; `num_ids` token ids have a row on some rank."""
        super().__init__(vocab_size, hidden_size)
        self.num_ids = min(max(num_ids - group.rank * vocab_size, 0), vocab_size)  # of the rank's rows

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[S, H] -> [S, V / size]."""
        logits = super().forward(hidden, out)
        logits[:, self.num_ids :] = -torch.inf
        return logits


class ShardedSum(RankSum):
    """Adds up over the ranks of a group."""

    def __init__(self, *, group: ProcessGroup) -> None:
        super().__init__()
        self.group, self.rank, self.size = group, group.rank, group.size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H], whole on every rank."""
        return self.group.all_reduce(x)


def sharded(layers: LayerSet, group: ProcessGroup, vocab_size: int) -> LayerSet:
    """Return `layers` for one rank's part of a model. `vocab_size` is the whole model's."""
    places: Replacements = {
        RankSum: partial(ShardedSum, group=group),
        RowParallelLinear: partial(ShardedRowLinear, group=group),
        VocabParallelEmbedding: partial(ShardedEmbedding, group=group),
        ParallelLMHead: partial(ShardedHead, group=group, num_ids=vocab_size),
    }
    return layers.having(places)
