"""Engines with codes for weights, or for K/V, which must have every kernel compiled when the first request comes."""

from __future__ import annotations

from typing import Any

from tests.helpers import tiny_checkpoint

# Two layers of stories-5m's sizes: which variant of a kernel is compiled depends on what divides them.
SIZES: dict[str, Any] = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 768, "vocab_size": 4096}
MODEL = {"model": str(tiny_checkpoint(num_hidden_layers=2, **SIZES))}
CODES = MODEL | {"random_weights": True, "kv_cache_dtype": "fp8"}
ENGINES: dict[str, dict[str, Any]] = {
    "FP8 times FP8": MODEL | {"random_weights": True, "quantization": "fp8"},
    "8 bits, and an 8-bit cache": CODES | {"quantization": "int8"},
    "4 bits, and a cache with scales of its own": CODES | {"quantization": "int4", "calculate_kv_scales": True},
}
