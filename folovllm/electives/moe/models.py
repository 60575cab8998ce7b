"""Models whose MLPs are mixtures of experts: the frame of their dense families, with another layer in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

from folovllm.distributed.sharding import EXPERTS, Weight
from folovllm.electives.moe.expert_load import ExpertLoad
from folovllm.electives.moe.experts import Experts
from folovllm.electives.moe.layers import MoE, expert_size_of
from folovllm.layers.layer_set import LayerSet
from folovllm.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP
from folovllm.models.model_config import UnsupportedModel, num_experts_of
from folovllm.models.qwen2 import Qwen2Attention
from folovllm.models.qwen3 import Qwen3Attention
from folovllm.models.shapes import Shapes, mlp_shapes
from folovllm.step.forward_batch import ForwardBatch

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


MOST_EXPERTS = 4_096  # of a layer; names of more than a billion would take for ever


def keep_experts_whole(name: str, weight: Weight, shard: Callable[[str, Weight], torch.Tensor]) -> torch.Tensor:
    """Expert parallelism: return an expert's weight whole, because one rank holds all of it. `shard` cuts all other weights."""
    return weight[:] if EXPERTS in name else shard(name, weight)


def expert_shapes(config: PretrainedConfig) -> Shapes:
    """The shapes of one expert's linear layers, which stands for all; none in a model without."""
    return mlp_shapes("mlp.experts.0", config.hidden_size, expert_size_of(config)) if num_experts_of(config) else {}


def check_experts(config: PretrainedConfig) -> None:
    """Raise ValueError, which names the field, if a token cannot be routed to as many experts as the configuration says."""
    count, top_k = num_experts_of(config), getattr(config, "num_experts_per_tok", None)
    field = "num_experts" if getattr(config, "num_experts", None) is not None else "num_local_experts"
    where = "in the model's configuration, and must be"
    if not 1 <= count <= MOST_EXPERTS:
        raise ValueError(f"{field} is {count} {where} at least 1, at most {MOST_EXPERTS:,}")
    if not isinstance(top_k, int) or not 1 <= top_k <= count:
        raise ValueError(f"num_experts_per_tok is {top_k!r} {where} between 1 and {field}, {count}")


class MoeForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM`, and in the place of each MLP a mixture of experts."""

    load: ExpertLoad | None = None

    def __init__(self, config: PretrainedConfig, layers: LayerSet, max_model_len: int | None = None) -> None:
        if getattr(config, "mlp_only_layers", None) or getattr(config, "decoder_sparse_step", 1) != 1:
            raise UnsupportedModel("layers with experts among layers without are not supported: all must have them")
        check_experts(config)
        if layers.kernels:
            from folovllm.electives.moe.fused import EXPERT_KERNELS  # here, for not every machine has Triton

            layers = layers.having(EXPERT_KERNELS)
        # The router and the experts read one normed stream, so the norm's weights cannot move into a projection.
        own: dict[Any, Any] = {LlamaMLP: layers.replacements.get(MoE, MoE), LlamaDecoderLayer: LlamaDecoderLayer}
        load = None if layers.counters is None else ExpertLoad(config, layers.counters)
        super().__init__(config, layers.having(own), max_model_len)
        moes = [cast(MoE, cast(LlamaDecoderLayer, layer).mlp) for layer in self.model.layers]
        self.load = load
        for moe in moes:
            moe.load = load
        self.held = moes[0].held
        self.has_stacks = False  # whether the checkpoint has a layer's experts in one tensor
        whole = 1 if getattr(config, "expert_parallel", False) else moes[0].sum.size
        count, inner, hidden = num_experts_of(config), expert_size_of(config) * whole, config.hidden_size
        self.stacks = {"gate_up_proj": [count, 2 * inner, hidden], "down_proj": [count, hidden, inner]}
        parts = self.packed_modules_mapping["gate_up_proj"]
        stacks = {
            "gate_ups": [f"{e}.{part}" for e in self.held for part in parts],
            "downs": [f"{e}.down_proj" for e in self.held],
        }
        self.packed_modules_mapping = {**self.packed_modules_mapping, **stacks}

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden = super().forward(batch)
        if self.load is not None:
            self.load.end(batch.slot_mapping)
        return hidden

    def local_name(self, name: str) -> str | None:
        """Return our name of a tensor; None for an expert that another rank holds."""
        named = super().local_name(name)
        if named is None or EXPERTS not in named:
            return named
        number = named.partition(EXPERTS)[2].split(".")[0]
        self.has_stacks = number in self.stacks
        return None if number.isdecimal() and int(number) not in self.held else named

    def local_tensors(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Take a stack of all experts apart (Qwen3.5). Raises ValueError if it has another shape."""
        for named, whole in super().local_tensors(name, tensor):
            before, _, leaf = named.rpartition(EXPERTS)
            if not before or leaf not in self.stacks:
                yield named, whole
                continue
            if list(whole.shape) != self.stacks[leaf]:
                raise ValueError(f"{name!r} has shape {list(whole.shape)}, the model expects {self.stacks[leaf]}")
            parts = self.packed_modules_mapping.get(leaf, [leaf])
            for e in self.held:
                for part, weight in zip(parts, whole[e].chunk(len(parts)), strict=True):
                    yield f"{before}{EXPERTS}{e}.{part}.weight", weight

    def checkpoint_name(self, name: str) -> str:
        before, experts, own = name.partition(EXPERTS)
        if experts and self.has_stacks:
            name = f"{before}{EXPERTS}{'down_proj' if 'down_proj' in own else 'gate_up_proj'}"
        return super().checkpoint_name(name)

    def stored_weight(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        before, experts, own = name.partition(EXPERTS)
        if not experts or not self.has_stacks:
            return super().stored_weight(name, weight)
        held = cast(Experts, self.get_submodule(f"{before}{EXPERTS}".rstrip(".")))
        leaf, stack = ("down_proj", held.downs) if "down_proj" in own else ("gate_up_proj", held.gate_ups)
        return stack.weight.view(self.stacks[leaf])


@cache
def with_experts(dense: type[LlamaForCausalLM]) -> type[LlamaForCausalLM]:
    """Return `dense` with a mixture of experts in the place of each MLP. What else `dense` changes in the frame stays."""
    return type(dense.__name__, (MoeForCausalLM, dense), {})


class MixtralForCausalLM(MoeForCausalLM):
    """Mixtral (8x7B, 8x22B; Jiang et al. 2024): Mistral with 8 experts of which each token asks 2, under other names."""

    renamed: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
    }


class Qwen2MoeForCausalLM(MoeForCausalLM):
    """Qwen2-MoE (Qwen1.5-MoE-A2.7B), with an expert that every token asks beside those of its choice."""

    attention_class = Qwen2Attention


class Qwen3MoeForCausalLM(MoeForCausalLM):
    """Qwen3-MoE (Qwen3-30B-A3B): 128 experts of which each token asks 8."""

    attention_class = Qwen3Attention
