"""The names that other texts and engines use, for classes of ours: their snippets run with the import line changed.

from folovllm.compat import LLMEngine, ModelConfig
engine = LLMEngine(ModelConfig(model="stories-5m", dtype="float32"), device="cpu")
print(engine.generate("Once upon a time", SamplingParams(max_tokens=20))["text"])
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from folovllm.config import EngineArgs, EngineConfig
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.prompt_forms import TextPrompt, TokensPrompt
from folovllm.llm import LLM
from folovllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM", "EngineArgs", "LLMEngine", "ModelConfig", "RequestOutputKind", "SamplingParams", "TextPrompt", "TokensPrompt",
]  # fmt: skip


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
