"""Engines with drafts, which must have every kernel compiled when the first request comes."""

from __future__ import annotations

from typing import Any

from tests.x2.traffic import MODEL

DRAFTS = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
ENGINES: dict[str, dict[str, Any]] = {"m6": MODEL | {"speculative_config": DRAFTS}}
