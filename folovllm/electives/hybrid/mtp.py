"""Multi-token prediction (MTP): the draft head of one layer in the checkpoints of Qwen3.5 and Qwen3-Next."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from folovllm.layers.layer_set import LayerSet
from folovllm.layers.linear import FLOATS
from folovllm.models.files import reading
from folovllm.models.gemma3 import Gemma3RMSNorm
from folovllm.models.loader import checkpoint_files, checkpoint_places, load_model, opened
from folovllm.models.model_config import FULL
from folovllm.models.random_weights import init_random_weights
from folovllm.models.registry import PLAIN_LAYERS, default_dtype, get_model_class

if TYPE_CHECKING:
    from folovllm.engine.setup import EngineSetup
    from folovllm.models.llama import LlamaForCausalLM
    from folovllm.step.forward_batch import ForwardBatch

PREFIX = "mtp."


class MtpHead(nn.Module):
    """The `DraftHead` in the model's own checkpoint: a matrix joins embedding and hidden state, then come a layer and a norm.

    The layer is the model's full-attention layer, with experts if the model has them. Embedding and vocabulary head are the
    model's. The hidden states that a chain carries are those after the norm, like the model's last hidden states.
    """

    config: Any
    aux_layers: tuple[int, ...] = ()
    target_ids: torch.Tensor | None = None
    is_in_checkpoint = True
    reorder = None
    _target: list[LlamaForCausalLM]  # in a list, so that it is no submodule

    def __init__(self, hf_config: Any, layers: LayerSet, max_model_len: int) -> None:
        """`hf_config`: the configuration of the model."""
        super().__init__()
        self.config = copy(hf_config)
        self.config.num_hidden_layers, self.config.layer_types = 1, [FULL]
        self.config.vocab_size, self.config.tie_word_embeddings = 1, False  # its embedding is never read
        model = get_model_class(self.config)(self.config, layers, max_model_len)
        self._model = [model]  # likewise: its embedding and vocabulary head are not the head's
        self.packed_modules_mapping = model.packed_modules_mapping
        size, eps = hf_config.hidden_size, hf_config.rms_norm_eps
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = (layers.make(Gemma3RMSNorm, size, eps) for _ in range(2))
        model.before_fc = nn.ModuleList([self.pre_fc_norm_embedding, self.pre_fc_norm_hidden])  # for `weights_loaded`
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers, self.norm = model.model.layers, model.model.norm

    @staticmethod
    def check(setup: EngineSetup, path: Path) -> None:
        """Raise ValueError, which names the file or the tensor, if the checkpoint in `path` holds no head of this kind."""
        config, file = setup.hf_config, path / "config.json"
        counts = [getattr(config, name, None) for name in ("mtp_num_hidden_layers", "num_nextn_predict_layers")]
        count = next((count for count in counts if count is not None), 1)
        if count != 1:
            raise ValueError(f"{file} says that the head has {count!r} layers, and only heads of one layer are known")
        if getattr(config, "mtp_use_dedicated_embeddings", False):
            raise ValueError(
                f"{file}: mtp_use_dedicated_embeddings is true, and only heads with the model's embedding are known"
            )
        if setup.config.random_weights:
            return
        with torch.device("meta"):
            head: Any = MtpHead(config, PLAIN_LAYERS, 1)
        wanted = {name: list(place.view.shape) for name, place in checkpoint_places(head).items()}
        if not (stored := head.stored_shapes(path)):
            raise ValueError(
                f'method "mtp" needs a checkpoint that holds a head, and no tensor in {path} begins with "mtp."'
            )
        for name in sorted(wanted.keys() | stored.keys()):
            found, asked = stored.get(name, "missing"), wanted.get(name, "no such tensor")
            if found != asked:
                raise ValueError(f"the head in {path}: {PREFIX + name!r} is {found}, and config.json asks for {asked}")

    def stored_shapes(self, path: Path) -> dict[str, list[int]]:
        """Return the shapes of the head's tensors in a checkpoint, by our names. Only headers are read.

        Raises ValueError for quantized weights, and for a stack of experts with a wrong shape.
        """
        shapes: dict[str, list[int]] = {}
        for file in checkpoint_files(path):
            with opened(file) as handle:
                for name in (name for name in handle.keys() if name.startswith(PREFIX)):  # noqa: SIM118  # no dict
                    stored = handle.get_slice(name)
                    with reading(file, name):
                        if (dtype := stored.get_dtype()) not in FLOATS:
                            raise ValueError(f"it is stored as {dtype}, and only heads in floating point are known")
                        empty = torch.empty(stored.get_shape(), device="meta")
                        shapes |= {part: list(tensor.shape) for part, tensor in self.local_tensors(name, empty)}
        return shapes

    @classmethod
    def load(cls, setup: EngineSetup, path: Path, target: LlamaForCausalLM, layers: LayerSet) -> MtpHead:
        """Build the head of `target`, and load its weights or make them up."""
        with torch.device(setup.device), default_dtype(setup.dtype):
            head = cls(setup.hf_config, layers, setup.max_model_len).requires_grad_(False).eval()
        if setup.config.random_weights:
            init_random_weights(head._model[0], setup.config.seed, checkpoint_places(head))  # type: ignore[arg-type]
        else:
            load_model(head, path, use_tqdm=False)  # type: ignore[arg-type]
        head._target = [target]
        return head

    def local_tensors(self, name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield the head's tensors in a tensor of the checkpoint, by our names: one, several for stacked experts, or none."""
        return self._model[0].local_tensors(name.removeprefix(PREFIX), tensor) if name.startswith(PREFIX) else []

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of our tensor."""
        return PREFIX + name

    def weights_loaded(self) -> None:
        """Repack linear weights, and add 1 to the weights of norms."""
        self._model[0].weights_loaded()

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the model's last hidden states as they are, [T, H]."""
        return hidden

    def inputs(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Join the embeddings of tokens and the hidden states before them: what the layer reads, [T, H]."""
        embedded = self._target[0].model.embed(batch.input_ids)
        return self.fc(torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1))

    def store(self, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        """Cache K and V of pairs."""
        layer: Any = self.layers[0]
        attention = layer.self_attn
        attention.prepare(attention.qkv_proj(layer.input_layernorm(self.inputs(hidden, batch))), batch)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Run one step of a chain, [S, H] -> [S, H]."""
        x, residual = self.layers[0](self.inputs(hidden, batch), None, batch)
        carried: torch.Tensor = self.norm(x, residual)[0]
        return carried

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [S, V], by the model's own vocabulary head."""
        logits: torch.Tensor = self._target[0].lm_head(hidden)
        return logits
