"""Engines with codes for weights, or for K/V, which must have every kernel compiled when the first request comes."""

from __future__ import annotations

from typing import Any

ENGINES: dict[str, dict[str, Any]] = {
    "8 bits": {"random_weights": True, "quantization": "int8"},
    "4 bits": {"random_weights": True, "quantization": "int4"},
    "8-bit cache": {"kv_cache_dtype": "fp8"},
    "8-bit cache, with scales of its own": {"kv_cache_dtype": "fp8", "calculate_kv_scales": True},
}
