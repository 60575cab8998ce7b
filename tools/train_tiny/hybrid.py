"""Make the embedded hybrid model out of the embedded model. `python -m tools.train_tiny.hybrid OUT`; README.md has the command for a GPU.

Two layers in three become linear attention, as Qwen3.5 has it; every third keeps full attention, with a gate. Each layer begins
with what the teacher's has: projections of queries, keys and values, and a convolution that lets tokens through unchanged (Wang et
al. 2024, "The Mamba in the Llama"). Then all of it learns to answer as the teacher does.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .data import make_batch
from .distil import answer, distance, distil, load_teacher, load_tokenizer, run_of, tensors_of
from .train import model_config

KINDS = ["linear_attention", "linear_attention", "full_attention"] * 2
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
SETTINGS = {"seed": 9, "matrices": 0.02, "others": 3e-3}


def hybrid_config() -> Qwen3_5TextConfig:
    """The dense model's shape, and other layers in the place of four: as many parameters, 5.8 million."""
    fields: dict[str, Any] = model_config().to_dict()
    for name in (
        "model_type",
        "architectures",
        "layer_types",
        "transformers_version",
        "sliding_window",
        "use_sliding_window",
    ):
        fields.pop(name, None)
    fields["rope_parameters"] = {**fields["rope_parameters"], "partial_rotary_factor": 1.0}
    return Qwen3_5TextConfig(**fields, **LINEAR, layer_types=KINDS)


def interleaved(query: Tensor, heads: int) -> Tensor:
    """The projection of queries and gates [2 Hq D, H] from that of queries, whose gates are half open."""
    parts = query.unflatten(0, (heads, -1))
    return torch.cat((parts, torch.zeros_like(parts)), 1).flatten(0, 1)


def fill_full(student: Any, teacher: Any, heads: int) -> None:
    """Gated attention that does what the teacher's does: a gate of 0 lets a half through, so the output counts twice."""
    student.q_proj.weight.copy_(interleaved(teacher.q_proj.weight, heads))
    student.k_proj.weight.copy_(teacher.k_proj.weight)
    student.v_proj.weight.copy_(teacher.v_proj.weight)
    student.o_proj.weight.copy_(2 * teacher.o_proj.weight)
    for name in ("q_norm", "k_norm"):
        getattr(student, name).weight.copy_(getattr(teacher, name).weight - 1)


def fill_linear(student: Any, teacher: Any) -> None:
    """Linear attention that begins with the teacher's projections, as far as its heads have room, and forgets slowly.

    Key head h gets query head 2h and KV head h. Value heads 2h and 2h + 1 get half of KV head h's values each.
    """
    query, key = (x.weight.unflatten(0, (-1, 64)) for x in (teacher.q_proj, teacher.k_proj))  # [4, 64, H], [2, 64, H]
    student.in_proj_qkv.weight.copy_(
        torch.cat(
            (query[::2].flatten(0, 1), key.flatten(0, 1), teacher.v_proj.weight.unflatten(0, (2, 64)).flatten(0, 1))
        )
    )
    out = teacher.o_proj.weight.unflatten(1, (2, 2, 64)).sum(2).flatten(1)  # of the query heads of each KV head
    student.out_proj.weight.copy_(out)
    student.conv1d.weight.zero_()[:, 0, -1] = 1.0
    student.A_log.copy_(torch.linspace(-5.0, -1.0, len(student.A_log)))


@torch.no_grad()
def student_of(teacher: Any) -> Qwen3_5ForCausalLM:
    """The teacher with other attention: embedding, MLPs and norms are copied."""
    student: Any = Qwen3_5ForCausalLM(hybrid_config())
    student.model.embed_tokens.weight.copy_(teacher.model.embed_tokens.weight)
    student.model.norm.weight.copy_(teacher.model.norm.weight - 1)
    for ours, theirs in zip(student.model.layers, teacher.model.layers, strict=True):
        ours.mlp.load_state_dict(theirs.mlp.state_dict())
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(ours, name).weight.copy_(getattr(theirs, name).weight - 1)
        if hasattr(ours, "self_attn"):
            fill_full(ours.self_attn, theirs.self_attn, student.config.num_attention_heads)
        else:
            fill_linear(ours.linear_attn, theirs.self_attn)
    return student


def measured(student: PreTrainedModel) -> dict[str, float]:
    """The perplexity of teacher and student on stories that nobody was trained on, and their distance."""
    ids, at = tensors_of(make_batch(load_tokenizer(), 7, 0, rows=4, held_out=True))
    wanted = ids.flatten()[at + 1]
    with torch.no_grad():
        dense, hybrid = (answer(model, ids, at)[0] for model in (load_teacher(), student))
    loss = nn.functional.cross_entropy
    return {
        "perplexity of the teacher": loss(dense, wanted).exp().item(),
        "perplexity": loss(hybrid, wanted).exp().item(),
        "KL": distance(hybrid, dense).item(),
    }


def main() -> None:
    run = run_of(__doc__, **SETTINGS)
    torch.manual_seed(run.seed)
    start = (
        AutoModelForCausalLM.from_pretrained(run.start, dtype=torch.float32)
        if run.start
        else student_of(load_teacher())
    )
    distil(run, start)
    student = AutoModelForCausalLM.from_pretrained(run.out, dtype=torch.float32)
    (run.out / "hybrid.json").write_text(json.dumps(measured(student), indent=1) + "\n")


if __name__ == "__main__":
    main()
