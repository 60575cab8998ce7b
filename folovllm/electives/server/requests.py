"""From a request of OpenAI's API to prompts, `SamplingParams`, and how its answers are read: its fields, messages and tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import msgspec

from folovllm.electives.server import reasoning
from folovllm.electives.server.errors import ApiError
from folovllm.electives.server.protocol import ChatRequest, CompletionRequest, Sampling, TokenizeRequest
from folovllm.electives.server.reasoning import ReasoningSplitter
from folovllm.electives.server.replies import MessageReader
from folovllm.electives.server.tool_calls import CLOSING, OPENING, ToolCallParser
from folovllm.electives.structured_output.guidance import WHITESPACE
from folovllm.electives.structured_output.params import StructuredOutputsParams
from folovllm.engine.chat_template import render, with_plain_content
from folovllm.engine.inputs import Prompt
from folovllm.engine.long_prompts import encode_within, too_long
from folovllm.engine.prompt_forms import TokensPrompt
from folovllm.sampling_params import RequestOutputKind, SamplingParams

A_CALL = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "a JSON object, as text"}}'
TAGS = (reasoning.OPENING, reasoning.CLOSING, OPENING, CLOSING)
ToolChoice = str | dict[str, Any] | None
CHOICES = ("none", "auto", "required")
SAME = set(Sampling.__struct_fields__) & SamplingParams.__dataclass_fields__.keys()  # handed on as they are
ONE_PROMPT: tuple[Any, ...] = (str, list[int])
PROMPTS = (*ONE_PROMPT, list[str], list[list[int]])
FORMATS = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
)
COMPLETION_TOKENS = 16  # OpenAI's default; a chat's answer may fill the context


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How a completion is sampled. `defaults` are the model's recommendations.

    `echo` with `logprobs` takes the prompt's as well. A prompt alone costs a token that nobody sees.
    """
    fields: dict[str, Any] = {"max_tokens": request.max_tokens, "logprobs": request.logprobs}
    if request.wants_prompt_alone:
        fields |= {"max_tokens": 1, "prompt_only": True}
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return _params(request, {"max_tokens": COMPLETION_TOKENS} | dict(defaults), fields)


def chat_params(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How an answer in a conversation is sampled."""
    most, other = request.max_completion_tokens, request.max_tokens
    if most is not None and other is not None and most != other:
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    fields = {
        "max_tokens": other if most is None else most,
        "logprobs": request.top_logprobs or 0 if request.logprobs else None,
    }
    return _params(request, {"max_tokens": None} | dict(defaults), fields)


def _params(request: Sampling, defaults: dict[str, Any], fields: dict[str, Any]) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(400, "prompt_logprobs are for whole answers: leave out stream", "prompt_logprobs")
    fields = {name: getattr(request, name) for name in SAME} | fields
    fields["structured_outputs"] = _structured_output(request)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    set_fields = {name: value for name, value in fields.items() if value is not None}
    return SamplingParams(**(defaults | set_fields), output_kind=kind)


def _structured_output(request: Sampling) -> StructuredOutputsParams | None:
    """What the answer must be: by `response_format`, `structured_outputs`, or tools that must be called. None: anything.

    Raises ApiError for an unknown kind, or for two of them.
    """
    params = _of_format(request.response_format)
    if request.structured_outputs is not None:
        if params is not None:
            raise ApiError(400, "response_format and structured_outputs: give one of them", "structured_outputs")
        params = _made(request.structured_outputs, "structured_outputs")
    if not isinstance(request, ChatRequest) or not (tools := offered(request.tools, request.tool_choice)):
        return params
    several = request.parallel_tool_calls is not False
    if must_call(request.tool_choice):
        return StructuredOutputsParams(grammar=call_grammar(tools, request.tool_choice, several))
    if params is not None and request.response_format is not None:  # a document, or a call
        return StructuredOutputsParams(grammar=call_grammar(tools, request.tool_choice, several, params.schema()))
    return params


def _of_format(response_format: dict[str, Any] | None) -> StructuredOutputsParams | None:
    kind = None if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    described = response_format.get("json_schema")
    if kind != "json_schema" or not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        raise ApiError(400, f"response_format must be {FORMATS}", "response_format")
    strict = described.get("strict")
    return _made({"json": described["schema"], "strict": False if strict is None else strict}, "response_format")


def _made(fields: dict[str, Any], param: str) -> StructuredOutputsParams:
    """The parameters that a request describes. Raises ApiError that names `param`."""
    try:
        return StructuredOutputsParams(**fields)
    except TypeError as error:
        raise ApiError(400, f"{param}: unknown field {str(error).split()[-1]}", param) from error
    except ValueError as error:
        raise ApiError(400, str(error), param) from error


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion: a text, texts, ids, or lists of ids."""
    for kind in PROMPTS:
        try:
            prompts = msgspec.convert(request.prompt, kind)
        except msgspec.ValidationError:
            continue
        return [prompts] if kind in ONE_PROMPT else prompts
    raise ApiError(400, "prompt must be a text, a list of texts, token ids, or a list of lists of token ids", "prompt")


def chat_prompt(tokenizer: Any, limit: int, request: ChatRequest | TokenizeRequest) -> TokensPrompt:
    """The prompt that the model's template makes of a conversation. Raises ValueError where the template refuses it."""
    if (count := len(request.messages or ()) + len(request.tools or ())) > limit:  # each takes a token at least
        raise too_long(f"at least {count}", limit)
    text = render(
        tokenizer,
        [checked(message, i) for i, message in enumerate(request.messages or [])],
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        tools=offered(request.tools, request.tool_choice) or None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return TokensPrompt(prompt=text, prompt_token_ids=encode_within(limit, tokenizer, text, add_special_tokens=False))


def checked(message: dict[str, Any], number: int) -> dict[str, Any]:
    """A message whose content is text, as a text or in parts, as templates want it. Raises ApiError that names its `number`."""
    if problem := _problem(message):
        raise ApiError(400, f"messages[{number}]: {problem}", "messages")
    plain = dict(message)
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    content = message.get("content")
    return {**plain, "content": "" if content is None else content}


def _problem(message: dict[str, Any]) -> str | None:
    """What is wrong with a message, and what to do."""
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or []
    if not isinstance(role, str):
        return 'each message needs a role: {"role": "user", "content": "..."}'
    for name in ("function_call", "audio"):
        if message.get(name):
            return f"{name} in a message is not supported by this server: leave it out"
    if not isinstance(content, str | list | None):
        return "the content of a message must be a text, or a list of text parts"
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return f"tool_calls in a message must be a list of {A_CALL}"
    if content is None and role != "assistant":
        return f"a message of {role!r} needs content: a text, or a list of text parts"
    return None


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return False
    return isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str | dict | None)


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, which templates write their own way. What is none, as `max_tokens` may cut one, stays text."""
    arguments: Any = call["function"].get("arguments") or {}
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = arguments
    return {**call, "function": {**call["function"], "arguments": read if isinstance(read, dict) else arguments}}


def offered(tools: list[dict[str, Any]] | None, choice: ToolChoice) -> list[dict[str, Any]]:
    """The tools that the model is to know of: none if it may call none. Raises ApiError for what is no tool."""
    for tool in tools or ():
        if tool.get("type") != "function" or not _is_function(tool.get("function")):
            shape = '{"type": "function", "function": {"name": ..., "parameters": {a JSON schema of an object}}}'
            raise ApiError(400, f"each of the tools must be {shape}", "tools")
    named = name_of(choice)
    if choice is not None and named is None and choice not in CHOICES:
        wanted = f'{", ".join(CHOICES)} or {{"type": "function", "function": {{"name": ...}}}}'
        raise ApiError(400, f"tool_choice must be {wanted}, not {choice!r}", "tool_choice")
    if not tools and choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools", "tool_choice")
    if named is not None and named not in [tool["function"]["name"] for tool in tools or ()]:
        raise ApiError(400, f"tool_choice names {named!r}, which is none of the tools", "tool_choice")
    return [] if choice == "none" else list(tools or ())


def _is_function(function: Any) -> bool:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return False
    parameters = function.get("parameters")
    return parameters is None or (isinstance(parameters, dict) and parameters.get("type", "object") == "object")


def name_of(choice: ToolChoice) -> str | None:
    """The one function that must be called, if the choice names one."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def must_call(choice: ToolChoice) -> bool:
    """Whether the answer must be a call."""
    return choice == "required" or name_of(choice) is not None


def call_grammar(
    tools: list[dict[str, Any]], choice: ToolChoice, several: bool, instead: dict[str, Any] | bool | None = None
) -> str:
    """A grammar, in Lark's notation, of an answer that consists of calls.

    Args:
        choice: names the one function that may be called, or allows all.
        several: whether there may be more calls than one; a named function is called once.
        instead: a JSON schema of what may be said in place of a call.
    """
    named = name_of(choice)
    functions = [tool["function"] for tool in tools if named in (None, tool["function"]["name"])]
    lines = ["start: answer | calls" if instead is not None else "start: calls"]
    lines += ['calls: call ("\\n" call)*' if several and named is None else "calls: call"]
    lines += ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = f'{OPENING}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        lines.append(f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + chr(10) + CLOSING)}")
        lines.append(f"arguments_{i}: %json {_json(schema, bool(function.get('strict')), is_object=True)}")
    if instead is not None:
        lines.append(f"answer: %json {_json(instead, True)}")
    return "\n".join(lines)


def _json(schema: dict[str, Any] | bool, strict: bool, is_object: bool = False) -> str:
    """A schema with how its documents are written."""
    if isinstance(schema, bool):
        schema = {}
    options = {"lenient": not strict, "whitespace_pattern": WHITESPACE}
    kind = {"type": "object"} if is_object and "type" not in schema else {}
    return json.dumps({**schema, **kind, "x-guidance": options})


def reading_of(
    request: ChatRequest, params: SamplingParams, prompt: str, parser: str | None, tags_are_special: bool
) -> tuple[SamplingParams, Callable[[], MessageReader]]:
    """How the text of the answers is read, and the sampling parameters that this needs.

    Tags must be text, even where the tokenizer takes them for special tokens; and the grammar of an answer begins behind
    its thought.

    Args:
        parser: which way the model thinks; None: thoughts stay in the content.
    """
    has_tools = bool(offered(request.tools, request.tool_choice))
    if parser is None and not has_tools:
        return params, MessageReader
    if request.skip_special_tokens is None and tags_are_special:
        params = replace(params, skip_special_tokens=False)
    splitter = None if parser is None else ReasoningSplitter(parser, prompt, begun(request))
    if splitter is not None and params.structured_outputs is not None and not splitter.is_over:
        params = replace(params, structured_outputs=replace(params.structured_outputs, after=reasoning.CLOSING))

    def make_reader() -> MessageReader:
        return MessageReader(
            copy(splitter), ToolCallParser(request.parallel_tool_calls is False) if has_tools else None
        )

    return params, make_reader


def begun(request: ChatRequest) -> str:
    """What the client wrote of the answer that is asked for."""
    content = request.messages[-1].get("content") if request.continue_final_message and request.messages else None
    return str(with_plain_content({"content": content})["content"] or "")
