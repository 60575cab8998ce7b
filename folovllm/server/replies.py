"""The JSON of replies, after OpenAI's API: what each address answers."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from folovllm.server.tool_calls import ToolCall


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class CompletionLogprobs(msgspec.Struct):
    """Of each token of a completion."""

    text_offset: list[int]
    token_logprobs: list[float | None]  # None for the first token of a prompt, which comes after nothing
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, other: CompletionLogprobs) -> None:
        """Add those of the tokens that follow."""
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


class PromptLogprob(msgspec.Struct):
    """A token that stands in a prompt, or could have, as vLLM's servers say it."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


class CompletionChoice(msgspec.Struct):
    """An answer, or what is new in it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    """A token of an answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of each token of an answer."""

    content: list[ChatLogprob]


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """A message, or what is new in it."""

    role: str = ""
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct):
    """An answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatDelta(msgspec.Struct):
    """What is new in an answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


C = TypeVar("C")


class Answer(msgspec.Struct, Generic[C], omit_defaults=True):
    """A response, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None  # of a chat


class ModelCard(msgspec.Struct):
    """A name of the model."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    """All its names."""

    object: str
    data: list[ModelCard]


class Tokens(msgspec.Struct, omit_defaults=True):
    """What `/tokenize` answers."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """What `/detokenize` answers."""

    prompt: str


NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


class TokenizerInfo(msgspec.Struct):
    """What `/tokenizer_info` answers: how texts become ids, and conversations texts."""

    tokenizer_class: str
    vocab_size: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    extra_special_tokens: list[str]
    added_tokens_decoder: dict[str, dict[str, Any]]


class Version(msgspec.Struct):
    """What `/version` answers."""

    version: str


def tokenizer_info(tokenizer: Any) -> TokenizerInfo:
    """What `/tokenizer_info` tells of a tokenizer, by the names of `tokenizer_config.json`. No path of this machine is among them."""
    added = {
        str(id_): {flag: getattr(token, flag) for flag in FLAGS}
        for id_, token in tokenizer.added_tokens_decoder.items()
    }
    named = {name: getattr(tokenizer, name) for name in NAMED}
    extra = [token for token in tokenizer.all_special_tokens if token not in named.values()]
    template = getattr(tokenizer, "chat_template", None)
    return TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
        chat_template=template if isinstance(template, str) else None,
        extra_special_tokens=extra,
        added_tokens_decoder=added,
        **named,
    )
