"""Names and shapes of the texts that this course grew from, so that their snippets run as they stand.

from folovllm.compat import LLMEngine, ModelConfig
engine = LLMEngine(ModelConfig(model="stories-5m", dtype="float32"), device="cpu")
print(engine.generate("Once upon a time", SamplingParams(max_tokens=20))["text"])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from folovllm.engine.input_processor import Prompt
from folovllm.llm import LLM, as_prompt_list
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams

__all__ = ["LLM", "LLMEngine", "ModelConfig", "SamplingParams"]


@dataclass(slots=True)
class ModelConfig:
    """Which model, in which precision."""

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False


class LLMEngine:
    """`LLM` behind the older constructor; one prompt gives one output, a list of prompts a list."""

    def __init__(self, model_config: ModelConfig, device: str | None = None, **overrides: Any) -> None:
        self._llm = LLM(device=device, **{**asdict(model_config), **overrides})

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | None = None, use_tqdm: bool = False
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one prompt (one output) or a list of them (a list)."""
        outputs = self._llm.generate(prompts, sampling_params, use_tqdm)
        single = any(item is prompts for item in as_prompt_list(prompts))  # then `prompts` was one
        return outputs[0] if single else outputs
