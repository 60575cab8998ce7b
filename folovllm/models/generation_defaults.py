"""The sampling parameters that a model recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from folovllm.models.files import read_json, reading
from folovllm.sampling_params import SamplingParams

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def generation_defaults(path: Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that generation_config.json sets. Raises ValueError, which names the file."""
    file = path / "generation_config.json"
    with reading(file):
        fields = read_json(file) if file.is_file() else {}
        found = {name: fields[name] for name in NAMES if fields.get(name) is not None}
        if "max_new_tokens" in found:
            found["max_tokens"] = found.pop("max_new_tokens")
        SamplingParams(**found)
    return found
