"""The hook for a head that drafts: a layer that reads the hidden states of the model beside which it runs, the *target*.

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
    its output gives logits for token t + 2. The pair stands at position t: RoPE turns it so, and its K and V are in slot t of
    the target's own blocks, in a cache of the head's own. Once the head has drafted token t + 2, its own output stands for
    the hidden state t + 1, which the target has not computed: so a chain goes on, one token a step.

    A head is an `nn.Module` on the target's device and in its dtype. Its K/V layers are its `layers.attention.Attention`
    modules, all of the shape that `config` gives; who drives it binds a cache and a backend to each before the first call,
    plans the backend before each `forward`, and pads a batch as it pads the target's. So all methods do device work alone,
    of fixed shapes: they may be captured in a CUDA graph. On several ranks each has the whole head, and gets the same input.

    Attributes:
        config: has `num_attention_heads`, `num_key_value_heads` and `head_dim` of the head's attention, or what
            `models.model_config.head_dim_of` makes it of, and `hidden_size`: H, the width of what a chain carries.
        aux_layers: layers of the target of which it wants the hidden state *before* the layer (the output of the one before,
            plus the residual stream), ascending. None wanted: the target's last hidden state, behind its last norm.
        target_ids: [Vd] int64, the target's id of each draft id, ascending, where the head knows a part of the vocabulary;
            None: its logits are the target's own, in the shape of its head's.
        is_in_checkpoint: its weights are in the target's checkpoint. Then it has the loader's `local_tensors`, `checkpoint_name`
            and `weights_loaded`, and an update of the target's weights may bring it others.
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
        """Build the head of `target`, a `LlamaForCausalLM`, of `layers`, and fill it from folder `path`; with `setup.config.random_weights` from chance.

        It may keep `target`'s embedding and head, which on several ranks are cut by vocabulary and answer for all ranks.
        """

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """What the target gives for each token -> what a chain carries, [T, H].

        `states`: [T, len(aux_layers) * H of the target], side by side, or without `aux_layers` the last one, [T, H].
        """

    def store(self, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        """Cache K and V of pairs whose output nobody reads, as those of a prompt.

        Args:
            hidden: [T, H], of the tokens before `batch.input_ids` [T].
            batch: `positions` and `slot_mapping` are those of the pairs; slot -1 is skipped. Nothing else may be read.
        """

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Cache K and V of one pair for each sequence, attend, and return what the next step of the chain carries, [S, H].

        `hidden` and `batch` as for `store`; `batch` is one of decodes, with everything that attention reads.
        """

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `forward` returned -> logits for the token after each pair's, [S, Vd], or the target's [S, V]."""
