"""What chapter X4 says of the tiny mixture of experts, from its own router: pictures, and the tables with `computed experts:...`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np

from folovllm.apps.bench.contenders import GEOMETRIES
from milestones import expert_pictures
from milestones.pictures import Picture
from milestones.routing import Routing, expected, read_by, routing_of, routings

ASSETS = Path(__file__).resolve().parents[2] / "folovllm/assets"
# A text in which no token has two experts that are nearly as likely: every machine draws the same picture.
TEXT = "Once upon a time, there was a little girl named Lily. She had a red kite. One day the kite flew away, and Lily was sad."
STORIES, TOKENS, SKIPPED = 64, 40, 8  # every story begins alike, so its first tokens say little
BATCHES = (1, 2, 4, 8, 16, 32, 64)


@cache
def stories() -> tuple[Routing, ...]:
    """The first 64 stories of the embedded calibration set, 40 tokens of each."""
    lines = (ASSETS / "stories-5m/calibration.jsonl").read_text("utf-8").splitlines()[:STORIES]
    return tuple(routings((json.loads(line)["text"] for line in lines), most=TOKENS))


@cache
def read() -> dict[int, float]:
    """Experts that a layer reads, by the tokens in a step: token t of n stories, as n sequences that decode side by side."""
    asked = np.stack([routing.experts[:, SKIPPED:] for routing in stories()])  # [stories, L, T, k]
    layers, positions = range(asked.shape[1]), range(asked.shape[2])
    found = {}
    for n in BATCHES:
        groups = (asked[i : i + n, layer, t] for i in range(0, STORIES, n) for layer in layers for t in positions)
        found[n] = round(read_by(groups), 1)
    return found


def load() -> np.ndarray:
    """Pairs of each expert in each layer, [L, E]."""
    return np.sum([routing.counts() for routing in stories()], axis=0)


def batch_table() -> str:
    """What a layer reads, counted and by the formula."""
    one = stories()[0]
    num_experts, asked = one.num_experts, one.experts.shape[-1]
    rows = [
        "| tokens in the step | experts read, counted | by the formula | pairs for each expert that is read |",
        "|---:|---:|---:|---:|",
    ]
    for n, experts in read().items():
        rows.append(f"| {n} | {experts:.1f} | {expected(num_experts, asked, n):.1f} | {n * asked / experts:.1f} |")
    return "\n".join(rows)


def load_table() -> str:
    """The busiest and the idlest expert of each layer, and what two ranks would have to do."""
    rows = ["| layer | busiest expert | idlest | busiest of 2 ranks | of 4 |", "|---:|---:|---:|---:|---:|"]
    for layer, counts in enumerate(load()):
        shares = counts / counts.sum()
        of = [f"{part.max() * ranks:.1f} x" for ranks in (2, 4) for part in [shares.reshape(ranks, -1).sum(-1)]]
        most, least = int(shares.argmax()), int(shares.argmin())
        rows.append(
            f"| {layer} | {most}: {100 * shares[most]:.0f}% | {least}: {100 * shares[least]:.0f}% | {of[0]} | {of[1]} |"
        )
    return "\n".join(rows)


def large_table() -> str:
    """Weights that a decode step of Qwen3-30B-A3B reads, in bf16, if all experts are equally likely."""
    one = GEOMETRIES["qwen3-30b-a3b"]
    layers, hidden, num_experts, asked = (
        one[name] for name in ("num_hidden_layers", "hidden_size", "num_experts", "num_experts_per_tok")
    )
    heads = 2 * (one["num_attention_heads"] + one["num_key_value_heads"])
    always = layers * (hidden * one["head_dim"] * heads + hidden * num_experts) + hidden * one["vocab_size"]
    expert = layers * 3 * hidden * one["moe_intermediate_size"]
    rows = ["| tokens in the step | experts read, of 128 | weights read | for each token |", "|---:|---:|---:|---:|"]
    for n in (1, 4, 16, 64, 256):
        count = expected(num_experts, asked, n)
        size = 2 * (always + count * expert) / 1e9
        rows.append(f"| {n} | {count:.0f} | {size:.1f} GB | {size / n:.2f} GB |")
    return "\n".join(rows)


def traffic_table() -> str:
    """What a rank sends for a layer of experts of Qwen3-30B-A3B, 256 tokens in the step: a ring all-reduce, or two all-to-alls."""
    one, tokens = GEOMETRIES["qwen3-30b-a3b"], 256
    row, asked, kv_heads = 2 * one["hidden_size"], one["num_experts_per_tok"], one["num_key_value_heads"]
    rows = [
        "| ranks | all-reduce | other ranks that a token asks | two all-to-alls | copies of each K/V head |",
        "|---:|---:|---:|---:|---:|",
    ]
    for ranks in (2, 4, 8, 16, 64):
        reduced = 2 * (ranks - 1) / ranks * tokens * row
        others = (ranks - 1) * (1 - (1 - 1 / ranks) ** asked)
        exchanged = 2 * tokens / ranks * others * row
        copies = max(1, ranks // kv_heads)
        rows.append(f"| {ranks} | {reduced / 1e6:.2f} MB | {others:.1f} | {exchanged / 1e6:.2f} MB | {copies} |")
    return "\n".join(rows)


def words_picture() -> Picture:
    """One text, word by word."""
    return expert_pictures.words(routing_of(TEXT))


def load_picture() -> Picture:
    """The experts' parts of the work, and where two ranks would share it."""
    return expert_pictures.load(load(), ranks=2)


def batch_picture() -> Picture:
    """Dots and curve."""
    one = stories()[0]
    return expert_pictures.batch(read(), one.num_experts, one.experts.shape[-1])
