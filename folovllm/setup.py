"""What is known before a weight is loaded: an `EngineConfig` that met a model and a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from folovllm.config import EngineConfig
from folovllm.model_config import num_linear_of

if TYPE_CHECKING:
    from folovllm.attention.backends.abstract import AttentionConfig

FEWEST_SNAPSHOTS = 16  # of states, where nobody gives a number


@dataclass(slots=True, frozen=True)
class EngineSetup:
    """Every choice of an engine: nothing is left open."""

    config: EngineConfig
    path: Path
    hf_config: Any
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    attention: AttentionConfig
    backend: str  # name of the attention backend; "" where Hugging Face attends
    block_size: int  # tokens a block, or a slot, holds

    @property
    def num_layers(self) -> int:
        """L: decoder layers."""
        return int(self.hf_config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """V: rows of the embedding, the bound of all token ids."""
        return int(self.hf_config.vocab_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V that one token takes over all layers, on one rank."""
        a = self.attention
        return (
            2
            * (self.num_layers - num_linear_of(self.hf_config))
            * a.num_kv_heads
            * a.head_dim
            * (a.kv_dtype or self.dtype).itemsize
        )

    @property
    def num_snapshots(self) -> int:
        """Snapshots of states that are kept; 0 where prefixes are not cached, or no layer keeps a state."""
        if not (self.config.enable_prefix_caching and num_linear_of(self.hf_config)):
            return 0
        return self.config.num_snapshots or max(FEWEST_SNAPSHOTS, self.max_num_seqs)

    @property
    def snapshot_interval(self) -> int:
        """Tokens between the snapshots of a sequence: a whole number of blocks."""
        return -(-self.config.snapshot_interval // self.block_size) * self.block_size


def plain(setup: EngineSetup) -> EngineSetup:
    """The set-up as it can be sent: without what may not exist in another process.

    That is a class of the model's own, and a proposer of the user's, for which a name stands: it drafts where the scheduler is.
    """
    config, hf_config = setup.config, SimpleNamespace(**setup.hf_config.to_dict())
    speculation = config.extras.get("speculative_config")
    if speculation is not None and not speculation.methods:
        config = replace(config, extras={**config.extras, "speculative_config": replace(speculation, method="ngram")})
    return replace(setup, config=config, hf_config=hf_config)
