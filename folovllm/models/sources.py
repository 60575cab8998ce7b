"""Models that are no folder yet: downloads, files in another format, and the Hugging Face hub."""

from __future__ import annotations

import os
import textwrap
from difflib import get_close_matches
from pathlib import Path

from folovllm.plugins import DOWNLOADS, FILE_FORMATS, load_elective

BY_NAME = ("stories-5m", "stories-moe", "stories-hybrid", *DOWNLOADS)  # the hub has none of them


def fetch(name: str) -> Path:
    """Download or convert a model, and return its folder. Raises ValueError if it is nowhere."""
    path = Path(os.path.expanduser(name))
    if name in DOWNLOADS:
        return Path(load_elective(DOWNLOADS[name], f"the model {name}")(name))
    if path.suffix in FILE_FORMATS and os.path.isfile(path):
        return Path(load_elective(FILE_FORMATS[path.suffix], f"the model {path}")(path))
    return from_hub(name)


def from_hub(name: str) -> Path:
    """Download (or find in the hub's cache) the safetensors, configuration and tokenizer of a hub id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"no model folder at {name!r:.300}, and it is not a hub id such as Qwen/Qwen3-0.6B") from error
    except Exception as error:  # offline, unknown, gated: the hub's own sentence says which
        near = "".join(f" (did you mean {other!r}?)" for other in get_close_matches(name, BY_NAME, 1, 0.7))
        message = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(
            f"no model folder at {name!r}{near}, and the Hugging Face hub did not give it: {message}"
        ) from error
