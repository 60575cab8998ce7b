"""From a request of OpenAI's API to prompts, `SamplingParams`, and how its answers are read: its fields, messages and tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from folovllm.electives.server import protocol, reasoning
from folovllm.electives.server.errors import ApiError
from folovllm.electives.server.protocol import ChatRequest, CompletionRequest, NamedTool, Sampling, TokenizeRequest
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

TAGS = (reasoning.OPENING, reasoning.CLOSING, OPENING, CLOSING)
SAME = set(Sampling.__struct_fields__) & SamplingParams.__dataclass_fields__.keys()  # handed on as they are
COMPLETION_TOKENS = 16  # OpenAI's default; a chat's answer may fill the context
Tools = list[dict[str, Any]]


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How a completion is sampled. `defaults` are the model's recommendations.

    `echo` with `logprobs` takes the prompt's as well. A prompt alone costs a token that nobody sees.
    """
    fields: dict[str, Any] = {"max_tokens": request.max_tokens, "logprobs": request.logprobs}
    if request.wants_prompt_alone:
        fields |= {"max_tokens": 1, "prompt_only": True}
    if request.echo and request.logprobs is not None:
        fields["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    fields["structured_outputs"] = _described(request)
    return _params(request, {"max_tokens": COMPLETION_TOKENS} | dict(defaults), fields)


def chat_params(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How an answer in a conversation is sampled."""
    most, other = request.max_completion_tokens, request.max_tokens
    if most is not None and other is not None and most != other:
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    described, tools = _described(request), offered(request)
    if tools and must_call(request):
        described = StructuredOutputsParams(grammar=call_grammar(request, tools))
    elif tools and described is not None and request.response_format is not None:  # a document, or a call
        described = StructuredOutputsParams(grammar=call_grammar(request, tools, described.schema()))
    fields = {
        "max_tokens": other if most is None else most,
        "logprobs": request.top_logprobs or 0 if request.logprobs else None,
        "structured_outputs": described,
    }
    return _params(request, {"max_tokens": None} | dict(defaults), fields)


def _params(request: Sampling, defaults: dict[str, Any], fields: dict[str, Any]) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(400, "prompt_logprobs are for whole answers: leave out stream", "prompt_logprobs")
    fields = {name: getattr(request, name) for name in SAME} | fields
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    set_fields = {name: value for name, value in fields.items() if value is not None}
    return SamplingParams(**(defaults | set_fields), output_kind=kind)


def _described(request: Sampling) -> StructuredOutputsParams | None:
    """What the answer must be by `response_format` or `structured_outputs`. None: anything. Raises ApiError for both of them."""
    asked, described = request.response_format, request.structured_outputs
    name, fields = "structured_outputs", described
    if asked is not None and asked.type != "text":
        if described is not None:
            raise ApiError(400, "response_format and structured_outputs: give one of them", name)
        name, fields = "response_format", {"json_object": True}
        if asked.type == "json_schema":
            if asked.json_schema is None:
                raise ApiError(400, 'response_format needs "json_schema": {"name": ..., "schema": ...}', name)
            fields = {"json": asked.json_schema.schema, "strict": bool(asked.json_schema.strict)}
    try:
        return None if fields is None else StructuredOutputsParams(**fields)
    except TypeError as error:
        raise ApiError(400, f"{name}: unknown field {str(error).split()[-1]}", name) from error
    except ValueError as error:
        raise ApiError(400, str(error), name) from error


def prompts_of(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a completion: a text, texts, ids, or lists of ids."""
    prompt: Any = request.prompt
    kinds = {type(part) for part in prompt}
    if isinstance(prompt, str) or kinds <= {int}:
        return [prompt]
    if len(kinds) > 1:
        raise ApiError(400, "prompt must be a text, a list of texts, token ids, or a list of lists of ids", "prompt")
    return list(prompt)


def chat_prompt(tokenizer: Any, limit: int, request: ChatRequest | TokenizeRequest) -> TokensPrompt:
    """The prompt that the model's template makes of a conversation. Raises ValueError where the template refuses it."""
    if (count := len(request.messages or ()) + len(request.tools or ())) > limit:  # each takes a token at least
        raise too_long(f"at least {count}", limit)
    text = render(
        tokenizer,
        checked(request.messages or []),
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        continue_final_message=request.continue_final_message,
        tools=offered(request) or None,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    return TokensPrompt(prompt=text, prompt_token_ids=encode_within(limit, tokenizer, text, add_special_tokens=False))


def checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates want them: content is a text or parts, arguments of calls are objects. Raises ApiError for what is no message."""
    protocol.converted(messages, list[protocol.MESSAGE], "messages")  # type: ignore[valid-type]
    plain = []
    for i, message in enumerate(messages):
        if (content := message.get("content")) is None and message["role"] != "assistant":
            says = f"messages[{i}]: a message of {message['role']!r} needs content: a text, or a list of text parts"
            raise ApiError(400, says, "messages")
        calls = list(map(_with_object, message.get("tool_calls") or ()))
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        plain.append(rest | {"content": "" if content is None else content} | ({"tool_calls": calls} if calls else {}))
    return plain


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object, which templates write their own way. What is none, as `max_tokens` may cut one, stays text."""
    arguments: Any = call["function"].get("arguments") or {}
    try:
        read = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        read = arguments
    return {**call, "function": {**call["function"], "arguments": read if isinstance(read, dict) else arguments}}


def offered(request: ChatRequest | TokenizeRequest) -> Tools:
    """The tools that the model is to know of: none if it may call none. Raises ApiError for what is no tool."""
    tools, choice = request.tools or [], request.tool_choice
    protocol.converted(tools, list[protocol.TOOL], "tools")  # type: ignore[valid-type]
    if not tools and must_call(request):
        raise ApiError(400, "tool_choice needs tools", "tool_choice")
    if isinstance(choice, NamedTool) and choice.function.name not in [tool["function"]["name"] for tool in tools]:
        message = f"tool_choice names {choice.function.name!r}, which is none of the tools"
        raise ApiError(400, message, "tool_choice")
    return [] if choice == "none" else tools


def must_call(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether the answer must be a call."""
    return request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)


def call_grammar(request: ChatRequest, tools: Tools, instead: dict[str, Any] | bool | None = None) -> str:
    """A grammar, in Lark's notation, of an answer that consists of calls: of several unless the request wants one, or names one.

    `instead` is a JSON schema of what may be said in place of a call.
    """
    choice, functions = request.tool_choice, [tool["function"] for tool in tools]
    if isinstance(choice, NamedTool):
        functions = [function for function in functions if function["name"] == choice.function.name]
    has_one = isinstance(choice, NamedTool) or request.parallel_tool_calls is False
    lines = ["start: answer | calls" if instead is not None else "start: calls"]
    lines += ["calls: call" if has_one else 'calls: call ("\\n" call)*']
    lines += ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = f'{OPENING}\n{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = {"type": "object"} | (function.get("parameters") or {"properties": {}})
        lines.append(f"call_{i}: {json.dumps(head)} arguments_{i} {json.dumps('}' + chr(10) + CLOSING)}")
        lines.append(f"arguments_{i}: %json {_json(schema, bool(function.get('strict')))}")
    if instead is not None:
        lines.append(f"answer: %json {_json({} if isinstance(instead, bool) else instead, True)}")
    return "\n".join(lines)


def _json(schema: dict[str, Any], strict: bool) -> str:
    """A schema with how its documents are written."""
    return json.dumps(schema | {"x-guidance": {"lenient": not strict, "whitespace_pattern": WHITESPACE}})


def reading_of(
    request: ChatRequest, params: SamplingParams, prompt: str, parser: str | None, tags_are_special: bool
) -> tuple[SamplingParams, Callable[[], MessageReader]]:
    """How the text of the answers is read, and the sampling parameters that this needs.

    Tags must be text, even where the tokenizer takes them for special tokens; and the grammar of an answer begins behind
    its thought.

    Args:
        parser: which way the model thinks; None: thoughts stay in the content.
    """
    has_tools = bool(offered(request))
    if parser is None and not has_tools:
        return params, MessageReader
    if request.skip_special_tokens is None and tags_are_special:
        params = replace(params, skip_special_tokens=False)
    splitter = None if parser is None else ReasoningSplitter(parser, prompt, begun(request))
    if splitter is not None and params.structured_outputs is not None and not splitter.is_over:
        params = replace(params, structured_outputs=replace(params.structured_outputs, after=reasoning.CLOSING))

    def make_reader() -> MessageReader:
        parser = ToolCallParser(request.parallel_tool_calls is False, not request.stream) if has_tools else None
        return MessageReader(copy(splitter), parser)

    return params, make_reader


def begun(request: ChatRequest) -> str:
    """What the client wrote of the answer that is asked for."""
    content = request.messages[-1].get("content") if request.continue_final_message and request.messages else None
    return str(with_plain_content({"content": content})["content"] or "")
