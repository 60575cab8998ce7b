"""What to do about a model that has no class here."""

from __future__ import annotations

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def who_runs_it(hf_config: Any) -> str:
    """Return the end of a sentence: it says so if `transformers`, and so M1, has this model."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(getattr(hf_config, "model_type", ""))
    known = name in (getattr(hf_config, "architectures", None) or [])
    return '; milestone="m1" runs it, through transformers' if known else ""
