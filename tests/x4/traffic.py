"""Engines with experts, which must have every kernel compiled when the first request comes."""

from typing import Any

from tests.x4.checkpoints import moe_checkpoint, wide_checkpoint

MODEL = {"model": str(moe_checkpoint("qwen2_moe", 2)), "dtype": "float16"}  # 6 experts, of which a token asks 3
ENGINES: dict[str, dict[str, Any]] = {
    "m6": MODEL,
    "no graphs": MODEL | {"enforce_eager": True},
    "m5": MODEL | {"milestone": "m5"},
    "codes": {"model": str(wide_checkpoint(2)), "dtype": "float16", "random_weights": True, "quantization": "int4"},
}
