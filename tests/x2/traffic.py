"""Engines with codes for weights, which must have every kernel compiled when the first request comes."""

from __future__ import annotations

from typing import Any

ENGINES: dict[str, dict[str, Any]] = {
    "8 bits": {"random_weights": True, "quantization": "int8"},
    "4 bits": {"random_weights": True, "quantization": "int4"},
}
