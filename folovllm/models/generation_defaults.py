"""The sampling parameters that a model recommends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from folovllm.models.files import read_json, reading
from folovllm.sampling_params import SamplingParams

NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
NAMES |= {"max_new_tokens": "max_tokens"}


def generation_defaults(path: Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that generation_config.json sets. Raises ValueError, which names the file."""
    file = path / "generation_config.json"
    with reading(file):
        fields = read_json(file) if file.is_file() else {}
        found = {ours: fields[theirs] for theirs, ours in NAMES.items() if fields.get(theirs) is not None}
        SamplingParams(**found)
    return found
