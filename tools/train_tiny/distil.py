"""How a student learns from the shipped model: `draft.py` and `experts.py` each make a student.

A student learns the whole distribution that the teacher has after each token, not the one token that the text goes on with.
One core of a CPU is enough to begin with; `--device cuda --rows 32 --workers 8` makes a hundred times as many tokens of it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen3ForCausalLM
from transformers.modeling_outputs import ModelOutput

from .data import IGNORE, Batch, batches, make_batch

TEACHER = Path(__file__).parents[2] / "folovllm" / "assets" / "stories-5m"
LOW = 0.3  # the temperature of `Run.sharp`
OWN_HELD_OUT = 32  # of the rows that the teacher wrote, not trained on


@dataclass
class Run:
    """The settings of a run. The defaults suit one core."""

    out: Path
    start: Path | None = None  # a student to go on from
    seed: int = 5  # other documents than the teacher saw
    steps: int = 2300
    minutes: float = math.inf  # the last step comes by then
    rows: int = 2
    warmup: int = 30
    matrices: float = 0.05  # learning rates: of the layers' matrices, by Muon
    others: float = 6e-3  # of all else, by AdamW
    sharp: float = 0.0  # weight of the distance at a low temperature, where it is the likeliest tokens that count
    own: Path | None = None  # rows that the teacher wrote, by `own_text.py`: half of each batch
    device: str = "cpu"
    workers: int = 0  # processes that make batches ahead
    every: int = 20  # steps from one line of the log to the next

    def __post_init__(self) -> None:
        if self.steps <= self.warmup:
            raise ValueError(f"{self.steps} steps are all warm-up, which takes {self.warmup}: more steps, or --warmup")


Also = Callable[[ModelOutput, Tensor], Tensor]  # what a student returns, ids [rows, ROW] -> one more part of its loss


def load_teacher(device: str = "cpu") -> Qwen3ForCausalLM:
    """The shipped model, in float32 on a CPU."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(TEACHER, dtype=dtype, attn_implementation="sdpa").eval().to(device)


def load_tokenizer() -> Tokenizer:
    """The teacher's, and so the student's."""
    return Tokenizer.from_file(str(TEACHER / "tokenizer.json"))


def tensors_of(batch: Batch, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Ids [rows, ROW], and behind which tokens, counted through all rows, the next one is to be learned, [n]."""
    ids, labels = (torch.from_numpy(array.astype(np.int64)) for array in batch)
    at = F.pad(labels[:, 1:] != IGNORE, (0, 1)).flatten().nonzero().flatten()
    if device == "cpu":
        return ids, at
    return ids.pin_memory().to(device, non_blocking=True), at.pin_memory().to(device, non_blocking=True)


def supply(run: Run) -> Iterator[Batch]:
    """The batches of a run: text by the grammar, made here or by workers, and half of each the teacher's own if there is any."""
    own = run.rows // 2 if run.own else 0
    if run.workers:
        made = batches(TEACHER, run.seed, run.rows - own, run.steps, run.workers)
    else:
        tokenizer = load_tokenizer()
        made = (make_batch(tokenizer, run.seed, step, run.rows - own) for step in range(run.steps))
    if run.own is None:
        return made
    written, rng = read_rows(run.own)[0], np.random.default_rng(run.seed)
    picks = (rng.choice(len(written[0]), own, replace=False) for _ in range(run.steps))
    return (joined(batch, (written[0][pick], written[1][pick])) for batch, pick in zip(made, picks, strict=True))


def read_rows(file: Path) -> tuple[Batch, Batch]:
    """The rows of `own_text`: those to train on, and those held out."""
    ids, labels = np.load(file)
    return (ids[OWN_HELD_OUT:], labels[OWN_HELD_OUT:]), (ids[:OWN_HELD_OUT], labels[:OWN_HELD_OUT])


def joined(one: Batch, other: Batch) -> Batch:
    """The rows of both."""
    return np.concatenate((one[0], other[0])), np.concatenate((one[1], other[1]))


def answer(model: PreTrainedModel, ids: Tensor, at: Tensor, **asked: bool) -> tuple[Tensor, ModelOutput]:
    """What the model expects behind the tokens `at` of ids [rows, ROW], [n, V] float32; and all else."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model.model(input_ids=ids, use_cache=False, **asked)
        return model.lm_head(out.last_hidden_state.flatten(0, 1)[at]).float(), out


def distance(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """KL divergence of the student's distribution from the teacher's, mean over [n, V] logits."""
    given, wanted = ((x / temperature).log_softmax(-1) for x in (student, teacher))
    return F.kl_div(given, wanted, log_target=True, reduction="batchmean")


def rate(step: int, seconds: float, run: Run) -> float:
    """Share of the learning rate: linear warm-up, then linear decay to zero, which comes with the last step or when time is up."""
    gone = max((step - run.warmup) / (run.steps - run.warmup), seconds / 60 / run.minutes)
    return max(0.0, min((step + 1) / run.warmup, 1 - gone))


def optimizers_of(student: PreTrainedModel, run: Run) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the layers' matrices, AdamW for all else, each with its learning rate."""
    sorted_: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, weight in student.named_parameters():
        sorted_[weight.ndim == 2 and "embed" not in name and ".gate." not in name].append(weight)
    muon = torch.optim.Muon(sorted_[True], weight_decay=0.0)
    adamw = torch.optim.AdamW(sorted_[False], betas=(0.9, 0.95), weight_decay=0.0)
    return [(muon, run.matrices), (adamw, run.others)]


class Log:
    """The KL divergence of each step, and what was added to it. Says now and then how it goes, and saves the student."""

    def __init__(self, run: Run, student: PreTrainedModel) -> None:
        self._run, self._student, self._start = run, student, time.perf_counter()
        self._new: list[Tensor] = []  # [2] each, still on the device
        self.values: dict[str, list[float]] = {"KL": [], "also": []}
        self._held_out = read_rows(run.own)[1] if run.own else None

    def add(self, loss: Tensor, more: Tensor) -> None:
        """One more step."""
        self._new.append(torch.stack((loss.detach(), more.detach())))
        if len(self._new) == self._run.every:
            self.tell()
            if len(self.values["KL"]) % (5 * self._run.every) == 0:
                self.write()

    def tell(self) -> None:
        """A line: the means of the steps since the last one."""
        if not self._new:
            return
        columns, self._new = torch.stack(self._new).T.tolist(), []
        for values, column in zip(self.values.values(), columns, strict=True):
            values += column
        means = "  ".join(f"{name} {np.mean(column):.4f}" for name, column in zip(self.values, columns, strict=True))
        print(f"step {len(self.values['KL'])}  {means}  {time.perf_counter() - self._start:.0f} s", flush=True)

    def write(self) -> None:
        """The student, and the losses so far; a line with how often it is right on the teacher's own text, if there is some."""
        self.tell()
        save(self._student, self._run.out)
        (self._run.out / "loss.json").write_text(json.dumps(self.values))
        if self._held_out is not None:
            print(agreement(self._student, self._held_out, self._run.device), flush=True)


def distil(run: Run, student: PreTrainedModel, also: Also | None = None, **asked: bool) -> dict[str, list[float]]:
    """Train, and write the student to `run.out` now and then. `also` is added to the loss, of what was `asked` besides.

    Returns the KL divergence of each step, and what `also` said.
    """
    print(f"{sum(p.numel() for p in student.parameters()):,} parameters", flush=True)
    teacher, student = load_teacher(run.device), student.to(run.device)
    optimizers, log, start = optimizers_of(student, run), Log(run, student), math.nan
    for step, batch in enumerate(supply(run)):
        start = time.perf_counter() if step == 0 else start
        share = rate(step, time.perf_counter() - start, run)
        if not share:
            break
        ids, at = tensors_of(batch, run.device)
        with torch.no_grad():
            wanted, _ = answer(teacher, ids, at)
        given, out = answer(student, ids, at, **asked)
        loss, more = distance(given, wanted), torch.zeros((), device=run.device) if also is None else also(out, ids)
        (loss + more + (run.sharp * distance(given, wanted, LOW) if run.sharp else 0.0)).backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        for optimizer, most in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = most * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        log.add(loss, more)
    log.write()
    return log.values


@torch.no_grad()
def agreement(student: PreTrainedModel, batch: Batch, device: str, guesses: int = 12) -> str:
    """How often the student's likeliest token is the next one of the answers in a batch, and how many of a step's guesses are right."""
    ids, at = tensors_of(batch, device)
    given, _ = answer(student, ids, at)
    right, at = (given.argmax(-1) == ids.flatten()[at + 1]).tolist(), at.tolist()
    steps, accepted, i = 0, 0, 0
    while i < len(at):
        end = next(
            (j for j in range(i, min(i + guesses, len(at))) if not right[j] or at[j] - at[i] > j - i), i + guesses
        )
        steps, accepted, i = steps + 1, accepted + min(end, len(at)) - i, end + 1
    return f"right {np.mean(right):.4f}, of {guesses} guesses {accepted / steps:.2f}"


def save(student: PreTrainedModel, folder: Path) -> None:
    """The student in bf16. Its tokenizer is its teacher's, and stays there."""
    student.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    deepcopy(student).to(torch.bfloat16).save_pretrained(folder)


def run_of(description: str | None, **defaults: int | float | str) -> Run:
    """The settings from the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, default=None, help="a student to go on from")
    parser.add_argument("--own", type=Path, default=None, help="rows that the teacher wrote, by `own_text`")
    for field in fields(Run):
        if field.name not in ("out", "start", "own"):
            default = defaults.get(field.name, field.default)
            parser.add_argument(f"--{field.name}", type=type(default), default=default)
    return Run(**vars(parser.parse_args()))
