"""The configuration of the texts that this course grew from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from folovllm.config import EngineConfig


@dataclass(slots=True)
class ModelConfig:
    """The fields of the model alone, for code that keeps them apart from the engine's arguments."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False

    def for_engine(self, **overrides: Any) -> EngineConfig:
        """The whole configuration: the latest milestone's, with `overrides`."""
        return EngineConfig(**{**asdict(self), **overrides})
