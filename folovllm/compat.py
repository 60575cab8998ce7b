"""The names that other texts and engines use, for classes of ours: their snippets run with the import line changed.

from folovllm.compat import LLMEngine, ModelConfig
engine = LLMEngine(ModelConfig(model="stories-5m", dtype="float32"), device="cpu")
print(engine.generate("Once upon a time", SamplingParams(max_tokens=20))["text"])
"""

from __future__ import annotations

from folovllm.config import EngineArgs
from folovllm.engine.inputs import TextPrompt, TokensPrompt
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.older_config import ModelConfig
from folovllm.llm import LLM
from folovllm.sampling_params import RequestOutputKind, SamplingParams

__all__ = [
    "LLM", "EngineArgs", "LLMEngine", "ModelConfig", "RequestOutputKind", "SamplingParams", "TextPrompt", "TokensPrompt",
]  # fmt: skip
