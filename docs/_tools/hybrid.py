"""What chapter X5 says of memory, by the engine's own count: `python docs/_tools/hybrid.py` prints it, with no weight in memory."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from folovllm.apps.bench.contenders import GEOMETRIES
from folovllm.config import EngineConfig
from folovllm.electives.hybrid.state_layer import StatePool, num_snapshots
from folovllm.engine.setup import EngineSetup, set_up
from folovllm.models.registry import build_model

HYBRID, FULL = "Qwen3.5-9B", "the same with full attention alone"
ASSETS = Path(__file__).resolve().parents[2] / "folovllm/assets"


@cache
def setup_of(name: str, max_num_seqs: int) -> EngineSetup:
    """The set-up of an engine for so many sequences, in bfloat16."""
    small = name.startswith("stories")
    config = json.loads((ASSETS / name / "config.json").read_text("utf-8")) if small else GEOMETRIES["qwen3.5-9b"]
    if name == FULL:
        config = config | {"layer_types": ["full_attention"] * config["num_hidden_layers"]}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), "utf-8")
        fields: dict[str, Any] = {
            "tokenizer": "stories-5m",
            "device": "cpu",
            "random_weights": True,
            "kv_cache_memory": 1 << 40,
        }
        return set_up(EngineConfig(model=folder, dtype="bfloat16", milestone="m6", max_num_seqs=max_num_seqs, **fields))


def state_bytes(setup: EngineSetup) -> int:
    """Memory of all state slots that an engine allocates: one for each sequence, one for padding, and the snapshots."""
    meta = torch.device("meta")
    return StatePool(replace(setup, device=meta), build_model(setup.hf_config, setup.dtype, meta, 1), 1 << 60).num_bytes


def in_words(num_bytes: float) -> str:
    """3.91 GiB, or 12.5 MiB."""
    size, unit = (num_bytes / 2**30, "GiB") if num_bytes >= 2**30 else (num_bytes / 2**20, "MiB")
    return f"{size:.3g} {unit}"


def growth_table() -> str:
    """One sequence, by its length: its K/V and its state."""
    full, hybrid = setup_of(FULL, 1), setup_of(HYBRID, 1)
    state = state_bytes(hybrid) / (1 + 1 + num_snapshots(hybrid))
    rows = ["| tokens of a sequence | 32 layers of full attention | 24 linear, 8 full |", "|---:|---:|---:|"]
    for tokens in (100, 1_000, 32_000, 256_000):
        sizes = full.kv_bytes_per_token * tokens, hybrid.kv_bytes_per_token * tokens + state
        rows.append(f"| {tokens:,} | {in_words(sizes[0])} | {in_words(sizes[1])} |")
    return "\n".join(rows)


def batch_table() -> str:
    """32 sequences: K/V, states, snapshots and all together."""
    rows = [
        "| 32 sequences | tokens of each | K/V | state slots | snapshots | together |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, tokens in ((HYBRID, 32_000), (FULL, 32_000), ("stories-hybrid", 4_000), ("stories-5m", 4_000)):
        setup = setup_of(name, 32)
        kv, pool = 32 * tokens * setup.kv_bytes_per_token, state_bytes(setup)
        snapshots = pool * num_snapshots(setup) // (33 + num_snapshots(setup))
        parts = (kv, pool - snapshots, snapshots, kv + pool)
        shown = " | ".join(in_words(part) if part else "0" for part in parts)
        rows.append(f"| {name if name in (HYBRID, FULL) else f'`{name}`'} | {tokens:,} | {shown} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(growth_table(), batch_table(), sep="\n\n")
