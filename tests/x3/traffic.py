"""Engines with guesses, which must have every kernel compiled when the first request comes."""

from __future__ import annotations

from typing import Any

GUESSES = {"method": "ngram", "num_speculative_tokens": 5, "adaptive": False}
ENGINES: dict[str, dict[str, Any]] = {"m6": {"speculative_config": GUESSES}}
