"""The calls of `LLM` beside `generate`: conversations, beam search, and other weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from folovllm.engine.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from folovllm.engine.chat_template import Message, as_conversations, render
from folovllm.engine.inputs import Prompt, PromptRequest, as_requests
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.long_prompts import encode_within
from folovllm.engine.prompt_forms import TokensPrompt
from folovllm.engine.require import takes_vllm_arguments
from folovllm.models.generation_defaults import generation_defaults
from folovllm.outputs import RequestOutput
from folovllm.plugins import CALLS, load_elective
from folovllm.sampling_params import SamplingParams


class LLMCalls:
    """What `LLM` can do beside `generate`, which all of it builds on."""

    engine: LLMEngine
    generate: Callable[..., list[RequestOutput]]
    _answer: Callable[[Sequence[PromptRequest], bool, Callable[[RequestOutput], object]], list[RequestOutput]]

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of calls that pass none: those of the model's generation_config.json, else our defaults."""
        return SamplingParams.from_optional(**generation_defaults(self.engine.setup.path))

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, which is transformers'."""
        return self.engine.get_tokenizer()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can be asked through `chat`."""
        return getattr(self.engine.tokenizer, "chat_template", None) is not None

    @property
    def llm_engine(self) -> LLMEngine:
        """`engine`, by vLLM's name."""
        return self.engine

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.tokenizer

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Raises ValueError where there is no cache."""
        return self.engine.reset_prefix_cache()

    def __getattr__(self, name: str) -> Any:
        """A call that an elective owns: a function of the engine in `folovllm.plugins.CALLS`, such as `update_weights` or `sleep`."""
        if name not in CALLS:
            raise AttributeError(f"LLM has no {name!r}")
        function = load_elective(CALLS[name], name)

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            with self.engine.one_call():
                return function(self.engine, *arguments, **named)

        return call

    @takes_vllm_arguments("request")
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role", "content"}, put through the model's chat template.

        The options are those of `chat_template.render`. In the outputs `prompt` is the text that the template made.
        """
        prompts = [
            self._render(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a conversation, up to where the answer begins; the options are those of `chat`."""
        return list(self._render(messages, **options)["prompt_token_ids"])

    def _render(self, messages: Sequence[Message], **options: Any) -> TokensPrompt:
        text = render(self.tokenizer, messages, **options)
        ids = encode_within(self.engine.setup.max_model_len, self.tokenizer, text, add_special_tokens=False)
        return TokensPrompt(prompt=text, prompt_token_ids=ids)

    def beam_search(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """For each prompt the `beam_width` most likely answers that a search over beams finds."""

        def answer(prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestOutput]:
            return self._answer(as_requests(prompts, params), False, lambda output: None)

        with self.engine.one_call():
            return search_beams(self.engine, answer, prompts, params)
