"""Train the embedded model. `python -m tools.train_tiny.train OUT`; with `--smoke` a tiny run on CPU, under a minute."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from .data import IGNORE, ROW, Batch, batches, make_batch
from .tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer

MAX_POSITIONS = 16_384


@dataclass
class Run:
    """The settings of a run. The defaults are those of the shipped model."""

    out: Path
    seed: int = 0
    steps: int = 3000
    rows: int = 128  # a batch is rows * ROW tokens
    warmup: int = 100
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    workers: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2) - 2))
    device: str = "cuda"
    compile: bool = True
    tokenizer_documents: int = 60_000


def model_config(**overrides: int) -> Qwen3Config:
    sizes = {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
    }
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        **(sizes | overrides),
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[2, 0],
        pad_token_id=0,
        attn_implementation="sdpa",
    )


def loss_of(model: Qwen3ForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of the labels that count. ids, labels: [rows, ROW]"""
    with torch.autocast(ids.device.type, torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state  # [rows, ROW, H]
        logits = model.lm_head(hidden[:, :-1])  # [rows, ROW - 1, V]
    return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE)


def rate(step: int, run: Run) -> float:
    """Linear warm-up, then linear decay to zero."""
    if step < run.warmup:
        return run.learning_rate * (step + 1) / run.warmup
    return run.learning_rate * (run.steps - step) / (run.steps - run.warmup)


def optimizer_for(model: Qwen3ForCausalLM, run: Run) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": run.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=run.device == "cuda")


def to_device(batch: Batch, device: str) -> list[Tensor]:
    return [torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True) for array in batch]


def perplexity(loss: Callable[..., Tensor], model: Qwen3ForCausalLM, held_out: list[list[Tensor]]) -> float:
    with torch.no_grad():
        return math.exp(sum(loss(model, *batch).item() for batch in held_out) / len(held_out))


def train(run: Run, **sizes: int) -> Qwen3ForCausalLM:
    """Train, and write model, tokenizer, loss.json and loss.png to `run.out`."""
    torch.manual_seed(run.seed)
    tokenizer = train_tokenizer(run.tokenizer_documents)
    save_tokenizer(tokenizer, run.out, MAX_POSITIONS)
    model = Qwen3ForCausalLM(model_config(**sizes)).to(run.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimizer = optimizer_for(model, run)
    loss_fn = torch.compile(loss_of, dynamic=False) if run.compile else loss_of
    held_out = [to_device(make_batch(tokenizer, 7, i, run.rows, held_out=True), run.device) for i in range(2)]
    log: dict[str, list[list[float]]] = {"loss": [], "perplexity": []}
    every, start = max(1, run.steps // 200), time.perf_counter()
    for step, batch in enumerate(batches(run.out, run.seed, run.rows, run.steps, run.workers)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, run)
        loss = loss_fn(model, *to_device(batch, run.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % every == 0:
            tokens = (step + 1) * run.rows * ROW
            log["loss"].append([tokens, loss.item()])
            if (step + 1) % (10 * every) == 0 or step + 1 == run.steps:
                log["perplexity"].append([tokens, perplexity(loss_fn, model, held_out)])
                speed = tokens / (time.perf_counter() - start)
                print(
                    f"step {step + 1}  loss {loss.item():.4f}  held-out perplexity {log['perplexity'][-1][1]:.4f}  {speed:,.0f} tokens/s",
                    flush=True,
                )
    save(model, log, run.out)
    return model


def save(model: Qwen3ForCausalLM, log: dict[str, list[list[float]]], folder: Path) -> None:
    """The model in bf16, and the curve as data and as a picture."""
    model.generation_config = GenerationConfig(eos_token_id=[2, 0], pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "loss.json").write_text(json.dumps({"columns": ["tokens", "value"], **log}))
    draw(log, folder / "loss.png")


def draw(log: dict[str, list[list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(*zip(*[(t / 1e6, v) for t, v in log["loss"]], strict=True), label="training loss", linewidth=1)
    axis.plot(
        *zip(*[(t / 1e6, math.log(v)) for t, v in log["perplexity"]], strict=True),
        "o-",
        label="held-out loss (log perplexity)",
        markersize=3,
    )
    axis.set(xlabel="million tokens", ylabel="nats per learned token", yscale="log")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)


def smoke(out: Path) -> None:
    """All of the above in tiny: three layers of code paths, no claim about quality but that the loss falls."""
    run = Run(out, steps=30, rows=2, warmup=5, workers=1, device="cpu", compile=False, tokenizer_documents=2000)
    train(
        run,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=128,
    )
    losses = [value for _, value in json.loads((out / "loss.json").read_text())["loss"]]
    if not losses[-1] < losses[0] - 0.5:
        raise SystemExit(f"the loss did not fall: {losses[0]:.2f} to {losses[-1]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=Run.steps)
    parser.add_argument("--seed", type=int, default=Run.seed)
    parser.add_argument("--smoke", action="store_true", help="a tiny model for a few steps on CPU")
    arguments = parser.parse_args()
    if arguments.smoke:
        smoke(arguments.out)
    else:
        train(Run(arguments.out, seed=arguments.seed, steps=arguments.steps))


if __name__ == "__main__":
    main()
