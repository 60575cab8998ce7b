"""Engines with drafts, which must have every kernel compiled when the first request comes."""

from typing import Any

from tests.x2.traffic import MODEL

DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
HEAD = {"method": "eagle3", "model": "stories-eagle3", "num_speculative_tokens": 3, "adaptive": False}
ENGINES: dict[str, dict[str, Any]] = {
    "m6": MODEL | {"speculative_config": DRAFTS},
    "a head": {"model": "stories-5m", "speculative_config": HEAD},
}
