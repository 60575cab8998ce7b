"""EAGLE-3 (Li et al., arXiv 2503.01840): a draft head of one layer, which reads hidden states from three layers of the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from folovllm.attention.backends.registry import get_backend
from folovllm.electives.spec_decode.eagle3_config import Eagle3Config, local_name, read_d2t, stored_shapes
from folovllm.electives.spec_decode.head_runner import head_attention
from folovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.layernorm import RMSNorm
from folovllm.layers.linear import QKVParallelLinear
from folovllm.layers.rotary_embedding import RotaryEmbedding, rope_amplitude, rope_frequencies
from folovllm.models.files import reading
from folovllm.models.llama import LlamaAttention, LlamaMLP
from folovllm.models.loader import checkpoint_places, load_model
from folovllm.models.model_config import head_dim_of
from folovllm.models.qwen3 import Qwen3Attention
from folovllm.models.random_weights import init_random_weights
from folovllm.models.registry import PLAIN_LAYERS, default_dtype

if TYPE_CHECKING:
    from folovllm.engine.setup import EngineSetup
    from folovllm.models.llama import LlamaForCausalLM
    from folovllm.step.forward_batch import ForwardBatch


class Eagle3Layer(nn.Module):
    """A decoder layer whose attention reads 2 H numbers: the token's embedding and the hidden state, each normed."""

    def __init__(self, config: Eagle3Config, layers: LayerSet, max_model_len: int) -> None:
        super().__init__()
        self._norm_before_residual = config.norm_before_residual
        rope = layers.make(
            RotaryEmbedding, rope_frequencies(config, head_dim_of(config)), max_model_len, rope_amplitude(config)
        )
        kind = Qwen3Attention if config.model_type == "qwen3" else LlamaAttention
        self.self_attn = attention = layers.make(kind, config, rope, layers)
        heads = attention.num_heads, attention.num_kv_heads, attention.head_dim
        bias = attention.qkv_proj.bias is not None
        attention.qkv_proj = layers.make(QKVParallelLinear, 2 * config.hidden_size, *heads, bias, layers.linear_method)
        self.mlp = layers.make(LlamaMLP, config, layers)
        size = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.hidden_norm = layers.make(RMSNorm, *size), layers.make(RMSNorm, *size)
        self.post_attention_layernorm = layers.make(RMSNorm, *size)

    def inputs(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention reads, [T, 2H], and the residual stream, [T, H]."""
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embedded), normed), -1)
        return both, normed if self._norm_before_residual else hidden

    def store(self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        """Cache K and V of pairs: two of the layer's products, and no attention."""
        attention, (both, _) = self.self_attn, self.inputs(embedded, hidden)
        linear, first = attention.qkv_proj, attention.num_heads * attention.head_dim
        bias = None if linear.bias is None else linear.bias[first:]
        both = F.linear(both, linear.weight[first:], bias).view(len(both), 2, -1, attention.head_dim)
        key, value = both.unbind(1)  # [T, Hkv, D]
        if (preparation := getattr(attention, "preparation", None)) is not None:
            from folovllm.kernels.qk_norm_rope import qk_norm_rope_store  # one kernel for what follows

            cache, slots = attention.attn.kv_cache, batch.slot_mapping
            qk_norm_rope_store(key[:, :1], key, value, batch.positions, cache, slots, preparation())
            return
        if isinstance(attention, Qwen3Attention):
            key = attention.k_norm(key.contiguous())
        _, key = attention.rope(batch.positions, key[:, :1], key)
        attention.attn.store(key, value, batch)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the MLP's output and the residual stream, [S, H] each; the next norm adds them."""
        both, residual = self.inputs(embedded, hidden)
        x, residual = self.post_attention_layernorm(self.self_attn(both, batch), residual)
        return self.mlp(x), residual


class Eagle3Head(nn.Module):
    """The `DraftHead` of a published EAGLE-3 folder."""

    packed_modules_mapping: ClassVar[Mapping[str, Sequence[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    reorder: Callable[..., torch.Tensor] | None = None
    is_in_checkpoint = False
    _embed: Callable[[torch.Tensor], torch.Tensor]
    _logits: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, config: Eagle3Config, layers: LayerSet, max_model_len: int, stored: Mapping[str, Any]) -> None:
        """`stored`: the folder's tensors by name. If it lacks the embedding or the vocabulary head, `load` takes the target's."""
        super().__init__()
        self.config, self.aux_layers = config, config.aux_layers
        self.target_ids: torch.Tensor | None = None
        states, hidden, eps = len(config.aux_layers), config.hidden_size, config.rms_norm_eps
        if config.norm_before_fc:
            self.input_norm = layers.make(RMSNorm, states * config.target_hidden_size, eps)
        if config.fc_norm:
            norms = [layers.make(RMSNorm, config.target_hidden_size, eps) for _ in range(states)]
            self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(states * config.target_hidden_size, hidden, bias=False)
        self.midlayer = Eagle3Layer(config, layers, max_model_len)
        self.norm = layers.make(RMSNorm, hidden, eps)
        self.embed_tokens: nn.Module | None = None
        if "embed_tokens.weight" in stored:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, hidden)
        self.lm_head: nn.Module | None = None
        if "lm_head.weight" in stored:
            self.lm_head = layers.make(ParallelLMHead, config.draft_vocab_size, hidden)

    @staticmethod
    def check(setup: EngineSetup, path: Path) -> None:
        """Raise ValueError, which names the file or the tensor, if folder `path` has no head for this target."""
        config = Eagle3Config.read(path, setup.hf_config)
        get_backend(setup.backend).check_available(head_attention(setup, config))
        if setup.config.random_weights:
            return
        stored = stored_shapes(path)
        read_d2t(path, config, setup.vocab_size, stored)
        with reading(path / "config.json"), torch.device("meta"):
            places = checkpoint_places(Eagle3Head(config, PLAIN_LAYERS, 1, stored))  # type: ignore[arg-type]
        shapes = {name: list(place.view.shape) for name, place in places.items()}
        for name in sorted(shapes.keys() | stored.keys()):
            if shapes.get(name) != stored.get(name):
                found = f"has shape {stored[name]}" if name in stored else "is missing"
                wanted = f"{shapes[name]}" if name in shapes else "no such tensor"
                raise ValueError(f"the head in {path}: {name!r} {found}, and config.json asks for {wanted}")
        shared = {"embed_tokens.weight", "lm_head.weight"} - stored.keys()
        if shared and config.hidden_size != setup.hf_config.hidden_size:
            raise ValueError(
                f"the head in {path} lacks {min(shared)!r}, and the model's own has another hidden size: "
                f"{setup.hf_config.hidden_size}, not {config.hidden_size}"
            )

    @classmethod
    def load(cls, setup: EngineSetup, path: Path, target: LlamaForCausalLM, layers: LayerSet) -> Eagle3Head:
        """Build the head of `target`, and load its weights or make them up."""
        config, is_random = Eagle3Config.read(path, setup.hf_config), setup.config.random_weights
        stored = {"lm_head.weight": [0]} if is_random else stored_shapes(path)
        with torch.device(setup.device), default_dtype(setup.dtype):
            head = cls(config, layers, setup.max_model_len, stored).requires_grad_(False).eval()
        if is_random:
            init_random_weights(head, setup.config.seed, checkpoint_places(head))  # type: ignore[arg-type]
            d2t: torch.Tensor | None = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
        else:
            load_model(head, path, use_tqdm=False)  # type: ignore[arg-type]
            d2t = read_d2t(path, config, setup.vocab_size, stored)
        if d2t is not None:
            head.target_ids = (d2t + torch.arange(len(d2t))).to(setup.device)
        head._embed, head._logits = head.embed_tokens or target.model.embed_tokens, head.lm_head or target.lm_head
        return head

    def local_tensors(self, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return a tensor of the folder under our name; [] for those that are no weights."""
        named = local_name(name)
        return [] if named is None else [(named, tensor)]

    def checkpoint_name(self, name: str) -> str:
        """Return the name unchanged. A folder may call the tensor otherwise (`local_name`); messages show our name."""
        return name

    def weights_loaded(self) -> None:
        """Do nothing: no weight is repacked."""

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden states [T, 3 H of the target] to [T, H]."""
        if self.config.norm_before_fc:
            hidden = self.input_norm(hidden)
        if self.config.fc_norm:
            parts = hidden.chunk(len(self.aux_layers), -1)
            hidden = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        combined: torch.Tensor = self.fc(hidden)
        return combined

    def store(self, hidden: torch.Tensor, batch: ForwardBatch) -> None:
        """Cache K and V of pairs."""
        self.midlayer.store(self._embed(batch.input_ids), hidden, batch)

    def forward(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Run one step of a chain, [S, H] -> [S, H]. The result is from before the last norm, unless `norm_output` is set."""
        x, residual = self.midlayer(self._embed(batch.input_ids), hidden, batch)
        normed, stream = self.norm(x, residual)
        return normed if self.config.norm_output else stream

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [S, draft_vocab_size]."""
        return self._logits(hidden if self.config.norm_output else self.norm(hidden))
