"""The hook for a draft head: a layer that reads the hidden states of a model, its *target*, and drafts tokens for it.

Speculative decoding (X3) drives any head. A target whose checkpoint holds one names it (`LlamaForCausalLM.mtp_head`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from folovllm.engine.setup import EngineSetup
    from folovllm.layers.layer_set import LayerSet
    from folovllm.step.forward_batch import ForwardBatch


class DraftHead(Protocol):
    """Drafts the token after next: from a token, and the hidden state of the token *before* it.

    The target has computed tokens 0 to t and sampled token t + 1. The head's input is the pair (token t + 1, hidden state t);
    its output gives logits for token t + 2. The pair has position t, for RoPE and for its K and V. These are in a cache of the
    head's own, with the block table of the target. The target has not computed the hidden state t + 1 yet. So the next step of
    a *chain* of drafts reads the head's own output in its place, with token t + 2.

    A head is an `nn.Module` on the target's device and in its dtype. Its K/V layers are its `layers.attention.Attention`
    modules, all of the shape in `config`. The runner binds a cache and a backend to each before the first call, plans the backend
    before each `forward`, and pads batches as it pads the target's. All methods do device work alone, of fixed shapes, so that
    a CUDA graph can capture them. On several ranks each has the whole head, and gets the same input.

    Attributes:
        config: has `num_attention_heads`, `num_key_value_heads` and `hidden_size` (H, the width of `combine`'s result) of the
            head, and `head_dim` or what `models.model_config.head_dim_of` computes it from.
        aux_layers: layers of the target, ascending; the head reads the hidden state *before* each (the output of the layer
            before, plus the residual stream). Empty: it reads the target's last hidden state, after the last norm.
        target_ids: [Vd] int64, the target's id of each draft id, ascending, if the head knows a part of the vocabulary. None:
            its logits are over the target's vocabulary, or over a rank's shard of it.
        is_in_checkpoint: its weights are in the target's checkpoint. Then it has the loader's `local_tensors`, `checkpoint_name`
            and `weights_loaded`, and an update of the target's weights may contain new ones for it.
    """

    config: Any
    aux_layers: tuple[int, ...]
    target_ids: torch.Tensor | None
    is_in_checkpoint: bool

    @staticmethod
    def check(setup: EngineSetup, path: Path) -> None:
        """Raise ValueError, which names the file, if `path` holds no head for the target that `setup` describes.

        Called before any weight is loaded. No tensor is read but the headers of files.
        """

    @classmethod
    def load(cls, setup: EngineSetup, path: Path, target: Any, layers: LayerSet) -> DraftHead:
        """Build the head of `target`, a `LlamaForCausalLM`, from `layers`, and load it from folder `path`.

        With `setup.config.random_weights` nothing is read. A head may use the target's embedding, which is complete on every
        rank, and its vocabulary head, which gives the logits of a rank's shard.
        """

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of a chain's first pairs, [T, H], from the target's.

        `hidden`: [T, len(aux_layers) * H of the target], side by side; without `aux_layers` the target's last one, [T, H].
        """

    def store(self, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        """Cache K and V of pairs whose output is not needed, such as those of a prompt.

        Args:
            hidden: [T, H], of the tokens before `batch.input_ids` [T].
            batch: `positions` and `slot_mapping` are those of the pairs; slot -1 is skipped. Nothing else may be read.
        """

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Run a step of a chain, one pair a sequence: cache K and V, attend, and return the next hidden states, [S, H].

        `hidden` and `batch` as for `store`; `batch` is a batch of decodes, with all that attention reads.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits for the token after each pair's, [S, Vd] or [S, V], from what `forward` returned."""
