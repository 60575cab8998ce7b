"""Distil the draft of the embedded model, on one core. `python -m tools.train_tiny.draft OUT`.

The draft is a student of the shipped model: it learns the whole distribution that the teacher has after each token, not
the one token that the text goes on with. How often the two agree is measured by `python -m tools.measure_speculation`.
"""

from __future__ import annotations

import argparse
import json
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3ForCausalLM

from .data import IGNORE, make_batch
from .train import model_config

TEACHER = Path(__file__).parents[2] / "folovllm" / "assets" / "stories-5m"
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 2,  # the fewest with which attention can copy: one finds the token before, one what followed it
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "intermediate_size": 384,
}


@dataclass
class Run:
    """The settings of a run. The defaults are those of the shipped draft."""

    out: Path
    start: Path | None = None  # a draft to go on from
    seed: int = 5  # other documents than the teacher saw
    steps: int = 2300
    rows: int = 2
    warmup: int = 30
    matrices: float = 0.05  # learning rates: of the layers' matrices, by Muon
    others: float = 6e-3  # of the embedding and the norms, by AdamW


def student_of(teacher: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """A small model that begins with the teacher's embedding, as well as its fewer dimensions can say it."""
    student = Qwen3ForCausalLM(model_config(**SIZES))
    table = teacher.model.embed_tokens.weight.float()  # [V, H of the teacher]
    _, _, axes = torch.linalg.svd(table, full_matrices=False)
    student.model.embed_tokens.weight.data.copy_(table @ axes[: SIZES["hidden_size"]].T)
    return student


def logits_of(model: Qwen3ForCausalLM, ids: Tensor, learn: Tensor) -> Tensor:
    """What the model expects after the tokens [rows, ROW] of which the next is to be learned, [n, V] float32."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        return model.lm_head(hidden[learn]).float()


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    """KL divergence of the student's distribution from the teacher's, mean over [n, V] logits."""
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")


def rate(step: int, run: Run) -> float:
    """Share of the learning rate: linear warm-up, then linear decay to zero."""
    return min((step + 1) / run.warmup, (run.steps - step) / (run.steps - run.warmup))


def distil(run: Run) -> Qwen3ForCausalLM:
    """Train, and write the model and its loss to `run.out`."""
    torch.manual_seed(run.seed)
    tokenizer = Tokenizer.from_file(str(TEACHER / "tokenizer.json"))
    teacher = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    student = Qwen3ForCausalLM.from_pretrained(run.start, dtype=torch.float32) if run.start else student_of(teacher)
    print(f"{sum(p.numel() for p in student.parameters()):,} parameters", flush=True)
    matrices = [p for name, p in student.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in student.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = (
        torch.optim.Muon(matrices, lr=run.matrices, weight_decay=0.0),
        torch.optim.AdamW(others, lr=run.others, betas=(0.9, 0.95), weight_decay=0.0),
    )
    start, log = time.process_time(), []
    for step in range(run.steps):
        arrays = make_batch(tokenizer, run.seed, step, run.rows)
        ids, labels = (torch.from_numpy(array.astype(np.int64)) for array in arrays)
        learn = labels[:, 1:] != IGNORE
        with torch.no_grad():
            wanted = logits_of(teacher, ids, learn)
        loss = distance(logits_of(student, ids, learn), wanted)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer, most in zip(optimizers, (run.matrices, run.others), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = most * rate(step, run)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        log.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}  KL {np.mean(log[-20:]):.4f}  {time.process_time() - start:.0f} s", flush=True)
        if (step + 1) % 300 == 0:
            save(student, run.out)
    save(student, run.out)
    (run.out / "loss.json").write_text(json.dumps(log))
    return student


def save(student: Qwen3ForCausalLM, folder: Path) -> None:
    """The draft in bf16. It needs no tokenizer: a draft is given tokens, its teacher's."""
    student.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    deepcopy(student).to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, default=None, help="a draft to go on from")
    parser.add_argument("--seed", type=int, default=Run.seed)
    parser.add_argument("--steps", type=int, default=Run.steps)
    parser.add_argument("--matrices", type=float, default=Run.matrices)
    parser.add_argument("--others", type=float, default=Run.others)
    distil(Run(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
