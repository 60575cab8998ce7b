"""The JSON of requests, after OpenAI's API: what each address takes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import defstruct, inspect

from folovllm.electives.server.errors import ApiError

# Each token of an answer is compared with all that may stop it, and the other lists are looked at within the event loop.
Stop = Annotated[str, msgspec.Meta(max_length=1024)]
Stops = Annotated[list[Stop], msgspec.Meta(max_length=64)]
StopIds = Annotated[list[int], msgspec.Meta(max_length=1024)]
AllowedIds = Annotated[list[int], msgspec.Meta(max_length=1 << 18)]
Bias = Annotated[dict[str, float], msgspec.Meta(max_length=1 << 16)]
Ids = Annotated[list[int], msgspec.Meta(max_length=1 << 20)]
Name = Annotated[str, msgspec.Meta(min_length=1)]


CALLED = defstruct("Called", [("name", str), ("arguments", str | dict[str, Any] | None, None)])
CALL = defstruct("Call", [("function", CALLED)])
# What must be true of a message and of a tool: the model's template gets them as they came, with all else that is in them.
MESSAGE = defstruct(
    "Message",
    [
        ("role", str),
        ("content", str | list[Any] | None, None),
        ("tool_calls", list[CALL] | None, None),  # type: ignore[valid-type]
        ("function_call", None, None),  # these two are not supported
        ("audio", None, None),
    ],
)
PARAMETERS = defstruct("Parameters", [("type", Literal["object"], "object")])
FUNCTION = defstruct("Function", [("name", Name), ("parameters", PARAMETERS | None, None)])
TOOL = defstruct("Tool", [("type", Literal["function"]), ("function", FUNCTION)])


class FunctionName(msgspec.Struct):
    """A function."""

    name: str


class NamedTool(msgspec.Struct):
    """A tool that must be called."""

    function: FunctionName


class NamedSchema(msgspec.Struct):
    """A JSON schema. Unless it is `strict`, keywords that cannot be kept are passed over."""

    schema: dict[str, Any] | bool
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """What an answer must be, as OpenAI's API says it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


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
    stop: Stop | Stops | None = None
    stop_token_ids: StopIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: Bias | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: AllowedIds | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None


class CompletionRequest(Sampling, kw_only=True):
    """`POST /v1/completions`."""

    prompt: str | list[int | str | list[int]]  # or token ids, or several of either: `requests.prompts_of`
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def wants_prompt_alone(self) -> bool:
        """Whether it is to be the prompt alone, with log-probabilities if these are asked for, and no answer."""
        return bool(self.echo) and self.max_tokens == 0


class ChatRequest(Sampling, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Ids


R = TypeVar("R", bound=msgspec.Struct)
T = TypeVar("T")

# Sent by clients for the sake of other servers: whatever they say, nothing changes here.
HARMLESS = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "parallel_tool_calls",
)  # fmt: skip
# What this server cannot do, and the values that ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "reasoning_effort", "chat_template"), ()),
    **dict.fromkeys(("audio", "prediction", "web_search_options"), ()),
    "best_of": (1,), "echo": (False,), "suffix": ("",), "use_beam_search": (False,), "modalities": (["text"],),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
}  # fmt: skip


def parse(body: bytes, kind: type[R], ignore_unknown: bool = False) -> R:
    """The request in a body. Raises ApiError (400) that names the field which is wrong, unknown, or of no use here."""
    try:
        decoded = msgspec.json.decode(body, type=dict[str, Any])
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ApiError(400, f"the body must be a JSON object: {error}") from error
    fields = {name: value for name, value in decoded.items() if name in kind.__struct_fields__}
    for name in decoded.keys() - fields.keys():
        if name in HARMLESS or decoded[name] is None or decoded[name] in NEUTRAL.get(name, ()):
            continue
        if name in NEUTRAL:
            instead = "say structured_outputs" if name.startswith("guided_") else "leave it out"
            raise ApiError(400, f"{name} is not supported by this server: {instead}", name, "unsupported_parameter")
        if not ignore_unknown:
            what = kind.__name__.removesuffix("Request").lower()
            raise ApiError(400, f"unknown field {name!r} in a {what} request: leave it out", name, "unknown_parameter")
    return converted(fields, kind)


def converted(value: Any, kind: type[T], name: str = "") -> T:
    """The value of a field, or all of them, as a type. Raises ApiError (400) that names the field which is wrong."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        message, _, path = str(error).partition(" - at `$")
        if message.startswith("Invalid enum value"):
            known = _allowed(inspect.type_info(kind), re.findall(r"\[.*?\]|\w+", path))
            message += f": it may be {', '.join(known)}"
        where = (name + path.rstrip("`")).removeprefix(".")
        raise ApiError(400, f"{where or 'the request'}: {message}", re.split(r"[^\w]", where)[0] or None) from error


def _allowed(kind: inspect.Type, path: list[str]) -> list[str]:
    """What the value at a path in a type may be, where it is one of a few."""
    match kind:
        case inspect.LiteralType():
            return list(map(repr, kind.values))
        case inspect.UnionType():
            return [value for one in kind.types for value in _allowed(one, path)]
        case inspect.ListType() if path:
            return _allowed(kind.item_type, path[1:])
        case inspect.StructType() if path:
            (field,) = (field for field in kind.fields if field.name == path[0])
            return _allowed(field.type, path[1:])
        case inspect.StructType():
            return ["an object"]
    return []
