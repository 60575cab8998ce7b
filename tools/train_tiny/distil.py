"""How a student learns from the shipped model, on one core of a CPU. `draft.py` and `experts.py` each make a student.

A student learns the whole distribution that the teacher has after each token, not the one token that the text goes on with.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3ForCausalLM
from transformers.modeling_outputs import ModelOutput

from .data import IGNORE, make_batch

TEACHER = Path(__file__).parents[2] / "folovllm" / "assets" / "stories-5m"


@dataclass
class Run:
    """The settings of a run. The defaults are those of the shipped draft."""

    out: Path
    start: Path | None = None  # a student to go on from
    seed: int = 5  # other documents than the teacher saw
    steps: int = 2300
    rows: int = 2
    warmup: int = 30
    matrices: float = 0.05  # learning rates: of the layers' matrices, by Muon
    others: float = 6e-3  # of all else, by AdamW


Also = Callable[[ModelOutput, Tensor], Tensor]  # what a student returns, ids [rows, ROW] -> one more part of its loss


def load_teacher() -> Qwen3ForCausalLM:
    """The shipped model in float32."""
    return AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32, attn_implementation="sdpa").eval()


def batch_of(tokenizer: Tokenizer, seed: int, index: int, rows: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Ids [rows, ROW], and after which of them the next one is to be learned, [rows, ROW - 1] bool."""
    arrays = make_batch(tokenizer, seed, index, rows, held_out)
    ids, labels = (torch.from_numpy(array.astype(np.int64)) for array in arrays)
    return ids, labels[:, 1:] != IGNORE


def answer(model: PreTrainedModel, ids: Tensor, learn: Tensor, **asked: bool) -> tuple[Tensor, ModelOutput]:
    """What the model expects after the tokens [rows, ROW] of which the next is to be learned, [n, V] float32; and all else."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model.model(input_ids=ids, use_cache=False, **asked)
        return model.lm_head(out.last_hidden_state[:, :-1][learn]).float(), out


def distance(student: Tensor, teacher: Tensor) -> Tensor:
    """KL divergence of the student's distribution from the teacher's, mean over [n, V] logits."""
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")


def rate(step: int, run: Run) -> float:
    """Share of the learning rate: linear warm-up, then linear decay to zero."""
    return min((step + 1) / run.warmup, (run.steps - step) / (run.steps - run.warmup))


def distil(run: Run, student: PreTrainedModel, also: Also | None = None, **asked: bool) -> dict[str, list[float]]:
    """Train, and write the student to `run.out` now and then. `also` is added to the loss, of what was `asked` besides.

    Returns the KL divergence of each step, and what `also` said.
    """
    tokenizer, teacher = Tokenizer.from_file(str(TEACHER / "tokenizer.json")), load_teacher()
    print(f"{sum(p.numel() for p in student.parameters()):,} parameters", flush=True)
    by_muon = {n for n, p in student.named_parameters() if p.ndim == 2 and "embed" not in n and ".gate." not in n}
    optimizers = (
        torch.optim.Muon([p for n, p in student.named_parameters() if n in by_muon], weight_decay=0.0),
        torch.optim.AdamW(
            [p for n, p in student.named_parameters() if n not in by_muon], betas=(0.9, 0.95), weight_decay=0.0
        ),
    )
    start, log = time.process_time(), {"KL": [], "also": []}
    for step in range(run.steps):
        ids, learn = batch_of(tokenizer, run.seed, step, run.rows)
        with torch.no_grad():
            wanted, _ = answer(teacher, ids, learn)
        given, out = answer(student, ids, learn, **asked)
        loss, more = distance(given, wanted), torch.zeros(()) if also is None else also(out, ids)
        (loss + more).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer, most in zip(optimizers, (run.matrices, run.others), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = most * rate(step, run)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for name, value in zip(log, (loss, more), strict=True):
            log[name].append(value.item())
        if (step + 1) % 20 == 0:
            means = "  ".join(f"{name} {np.mean(values[-20:]):.4f}" for name, values in log.items())
            print(f"step {step + 1}  {means}  {time.process_time() - start:.0f} s", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == run.steps:
            save(student, run.out)
            (run.out / "loss.json").write_text(json.dumps(log))
    return log


def save(student: PreTrainedModel, folder: Path) -> None:
    """The student in bf16. Its tokenizer is its teacher's, and stays there."""
    student.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    deepcopy(student).to(torch.bfloat16).save_pretrained(folder)


def run_of(description: str | None, **defaults: float) -> Run:
    """The settings from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, default=None, help="a student to go on from")
    for name in ("seed", "steps", "matrices", "others"):
        default = defaults.get(name, getattr(Run, name))
        parser.add_argument(f"--{name}", type=type(default), default=default)
    return Run(**vars(parser.parse_args()))
