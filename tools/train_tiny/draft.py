"""Distil the draft of the embedded model. `python -m tools.train_tiny.draft OUT`, on one core; README.md has the command for a GPU.

How often draft and teacher agree is measured by `python -m tools.measure_speculation`.
"""

from __future__ import annotations

import torch
from transformers import Qwen3ForCausalLM

from .distil import distil, load_teacher, run_of
from .train import model_config

SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,  # the fewest with which attention can copy: one finds the token before, one what followed it
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 480,
}


def student_of(teacher: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """A small model that begins with the teacher's embedding, as well as its fewer dimensions can say it."""
    student = Qwen3ForCausalLM(model_config(**SIZES))
    table = teacher.model.embed_tokens.weight.detach()  # [V, H of the teacher]
    _, _, axes = torch.linalg.svd(table, full_matrices=False)
    student.model.embed_tokens.weight.data.copy_(table @ axes[: SIZES["hidden_size"]].T)
    return student


def main() -> None:
    run = run_of(__doc__)
    torch.manual_seed(run.seed)
    distil(
        run,
        Qwen3ForCausalLM.from_pretrained(run.start, dtype=torch.float32) if run.start else student_of(load_teacher()),
    )


if __name__ == "__main__":
    main()
