"""The JSON of OpenAI's API: what requests may hold, and what answers look like."""

from __future__ import annotations

import re
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from folovllm.server.errors import ApiError
from folovllm.server.tool_calls import ToolCall

# For readers of /openapi.json, where the type alone says less than what is taken.
KINDS = ({"type": "integer"}, {"type": "string"}, {"type": "array", "items": {"type": "integer"}})
Several = Annotated[list[Any], msgspec.Meta(extra_json_schema={"anyOf": [{"items": kind} for kind in KINDS]})]
ROLE = {"role": {"type": "string"}, "content": {"type": ["string", "array", "null"], "items": {"type": "object"}}}
Message = Annotated[dict[str, Any], msgspec.Meta(extra_json_schema={"required": ["role"], "properties": ROLE})]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream shows beside the text."""

    include_usage: bool = False  # in a last chunk that has no text
    continuous_usage_stats: bool = False  # in every chunk


class Sampling(msgspec.Struct, kw_only=True):
    """What both kinds of requests have. None stands for a field that is not there."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


class CompletionRequest(Sampling, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | Several
    logprobs: int | None = None
    echo: bool | None = None


class ChatRequest(Sampling, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


R = TypeVar("R", bound=msgspec.Struct)

# Sent by clients for the sake of other servers: whatever they say, nothing changes here.
HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip
# What this server cannot do, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),  # in a chat
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "chat_template": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "use_beam_search": (False,),
}


def parse(body: bytes, kind: type[R], ignore_unknown: bool = False) -> R:
    """The request in a body. Raises ApiError (400) that names the field which is wrong, unknown, or of no use here."""
    try:
        said = msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(said, dict):
        raise ApiError(400, "the body must be a JSON object: {...}")
    known = kind.__struct_fields__
    fields = {name: value for name, value in said.items() if name in known}
    for name in said.keys() - fields.keys():
        check_stray(name, said[name], kind.__name__, ignore_unknown)
    try:
        return msgspec.convert(fields, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        message, _, path = str(error).partition(" - at `$.")
        param = re.split(r"[^\w]", path)[0] or None
        raise ApiError(400, f"{path.rstrip('`') or 'the request'}: {message}", param) from error


def check_stray(name: str, value: Any, kind: str, ignore_unknown: bool) -> None:
    """Raise ApiError for a field that the request does not have, unless it asks for nothing."""
    if name in HARMLESS or value is None:
        return
    if name in NEUTRAL:
        if value not in NEUTRAL[name]:
            instead = "say structured_outputs" if name.startswith("guided_") else "leave it out"
            raise ApiError(400, f"{name} is not supported by this server: {instead}", name, "unsupported_parameter")
    elif not ignore_unknown:
        what = kind.removesuffix("Request").lower()
        raise ApiError(400, f"unknown field {name!r} in a {what} request: leave it out", name, "unknown_parameter")


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
