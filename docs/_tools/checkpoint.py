"""What the book shows of a checkpoint's files, of how RoPE is stretched, and of which models load. See `excerpts.py`."""

from __future__ import annotations

import json
import math
import struct
from types import SimpleNamespace
from typing import Any

import torch
from anatomy import FOLDER, LARGE, SMALL, fields, letters, skeleton, table

from folovllm.layers.rope_scaling import SCALINGS
from folovllm.layers.rotary_embedding import rope_amplitude, rope_frequencies
from folovllm.models.loader import checkpoint_places
from folovllm.models.registry import ARCHITECTURES
from folovllm.plugins import MODELS

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}


def header() -> dict[str, Any]:
    """The beginning of the embedded model's file: eight bytes say how long it is, then it is JSON."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        content: dict[str, Any] = json.loads(file.read(length))
    return content


def header_text() -> str:
    """The tensors of layer 0, and the size of the whole."""
    tensors = {name: entry for name, entry in header().items() if name != "__metadata__"}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors.items() if ".layers.0." in name]
    return "\n".join(["```text", *lines, f"... {len(tensors)} tensors in all", "```"])


def packing_table() -> str:
    """Which rows of which parameter each tensor of layer 0 fills."""
    model, rows = skeleton(SMALL), []
    owners = {weight.untyped_storage()._cdata: name for name, weight in model.named_parameters()}
    for name, place in checkpoint_places(model).items():
        if ".layers.0." in name:
            first = place.view.storage_offset() // (place.view.shape[-1] if place.view.dim() > 1 else 1)
            owner = owners[place.view.untyped_storage()._cdata].removeprefix("model.layers.0.")
            rows.append(
                (f"`{name.removeprefix('model.layers.0.')}`", f"`{owner}`", f"{first} to {first + len(place.view) - 1}")
            )
    return table("in the file | in the model | rows", *rows)


def rope_table() -> str:
    """Pairs of Qwen3-0.6B's heads, plain and under YaRN: how often each turns in the first training's context."""
    head_dim, context = letters(LARGE)["D"], YARN["original_max_position_embeddings"]
    plain = rope_frequencies(SimpleNamespace(rope_parameters=fields(LARGE)["rope_parameters"]), head_dim)
    yarn = rope_frequencies(_stretched(), head_dim)
    rows = []
    for pair in (0, 8, 16, 24, 28, 32, 36, 40, 48, head_dim // 2 - 1):
        turns = context * float(plain[pair]) / (2 * math.pi)
        rows.append(
            (
                str(pair),
                f"{turns:,.2f}",
                f"{float(plain[pair]):.2e}",
                f"{float(yarn[pair]):.2e}",
                f"{float(plain[pair] / yarn[pair]):.2f}",
            )
        )
    return table("pair | turns in 32,768 tokens | angle a token, plain | under YaRN | slower by", *rows)


def amplitude_text() -> str:
    """By how much scores grow under this scaling."""
    amplitude = rope_amplitude(_stretched())
    return f"With a factor of {YARN['factor']:g} the amplitude is {amplitude:.3f}, and scores grow by its square, {amplitude**2:.3f}."


def _stretched() -> Any:
    return SimpleNamespace(rope_parameters=YARN, max_position_embeddings=40960)


def supported_table() -> str:
    """What our own layers have, from the registry and the table of scalings."""
    families = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES | MODELS))
    return table(
        "of `config.json` | what loads",
        ("`architectures`", families),
        ("`rope_type`", ", ".join(f"`{kind}`" for kind in ("default", *SCALINGS))),
        ("`hidden_act`", "`silu`"),
        ("`quantization_config`", "none"),
    )


def head_of_file() -> str:
    """How long the header is, and the file."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    size = (FOLDER / "model.safetensors").stat().st_size
    weights = sum(weight.numel() for weight in skeleton(SMALL).parameters()) * torch.bfloat16.itemsize
    return f"Of the {size:,} bytes of `model.safetensors`, 8 + {length:,} are header and {weights:,} are weights, two bytes each."
