"""From a request of OpenAI's API to prompts and `SamplingParams`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec

from folovllm.chat_template import render
from folovllm.engine.input_processor import encode_within, too_long
from folovllm.inputs import Prompt, TokensPrompt
from folovllm.sampling_params import RequestOutputKind, SamplingParams
from folovllm.server.conversation import call_grammar, checked, must_call, offered
from folovllm.server.errors import ApiError
from folovllm.server.protocol import ChatRequest, CompletionRequest, Sampling, TokenizeRequest
from folovllm.structured_outputs import StructuredOutputsParams

SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
    "truncate_prompt_tokens", "logit_bias", "bad_words", "allowed_token_ids", "prompt_logprobs",
)  # fmt: skip
ONE_PROMPT: tuple[Any, ...] = (str, list[int])
PROMPTS = (*ONE_PROMPT, list[str], list[list[int]])
MOST = {"stop": 64, "stop_token_ids": 1024}  # entries: each token of an answer is compared with all of them
MOST |= {"allowed_token_ids": 1 << 18, "logit_bias": 1 << 16}  # each is looked at within the event loop
LONGEST_STOP = 1024  # characters; as many are looked through again with each token
FORMATS = (
    '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
)
COMPLETION_TOKENS = 16  # OpenAI's default; a chat's answer may fill the context


def completion_params(request: CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How a completion is drawn. `defaults` are the model's recommendations.

    `echo` with `logprobs` takes the prompt's as well. A prompt alone (`wants_prompt_alone`) costs a token that nobody sees.
    """
    own: dict[str, Any] = {"max_tokens": request.max_tokens, "logprobs": request.logprobs}
    if wants_prompt_alone(request):
        own |= {"max_tokens": 1, "prompt_only": True}
    if request.echo and request.logprobs is not None:
        own["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return _params(request, {"max_tokens": COMPLETION_TOKENS} | dict(defaults), own)


def wants_prompt_alone(request: CompletionRequest) -> bool:
    """Whether a completion is to be its prompt alone, with log-probabilities if these are asked for, and no answer."""
    return bool(request.echo) and request.max_tokens == 0


def chat_params(request: ChatRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """How an answer in a conversation is drawn."""
    most, other = request.max_completion_tokens, request.max_tokens
    if most is not None and other is not None and most != other:
        raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", "max_completion_tokens")
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    own = {
        "max_tokens": other if most is None else most,
        "logprobs": request.top_logprobs or 0 if request.logprobs else None,
    }
    return _params(request, {"max_tokens": None} | dict(defaults), own)


def _params(request: Sampling, defaults: dict[str, Any], own: dict[str, Any]) -> SamplingParams:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(400, "prompt_logprobs are for whole answers: leave out stream", "prompt_logprobs")
    _require_few(request)
    given = {name: getattr(request, name) for name in SAME} | own
    given["structured_outputs"] = _structured_output(request)
    kind = RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY
    return SamplingParams(
        **(defaults | {name: value for name, value in given.items() if value is not None}), output_kind=kind
    )


def _require_few(request: Sampling) -> None:
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    for name, most in MOST.items():
        count = len(stop if name == "stop" else getattr(request, name) or ())
        if count > most:
            raise ApiError(400, f"{name} has {count} entries: give {most} at most", name)
    if (longest := max(map(len, stop), default=0)) > LONGEST_STOP:
        raise ApiError(400, f"stop has a text of {longest} characters: give {LONGEST_STOP} at most", "stop")


def _structured_output(request: Sampling) -> StructuredOutputsParams | None:
    """What the answer must be: by `response_format`, `structured_outputs`, or tools that must be called. None: anything.

    Raises ApiError for an unknown kind, or for two of them.
    """
    asked = _of_format(request.response_format)
    if request.structured_outputs is not None:
        if asked is not None:
            raise ApiError(400, "response_format and structured_outputs: give one of them", "structured_outputs")
        asked = _made(request.structured_outputs, "structured_outputs")
    if not isinstance(request, ChatRequest) or not (tools := offered(request.tools, request.tool_choice)):
        return asked
    several = request.parallel_tool_calls is not False
    if must_call(request.tool_choice):
        return StructuredOutputsParams(grammar=call_grammar(tools, request.tool_choice, several))
    if asked is not None and request.response_format is not None:  # a document, or a call
        return StructuredOutputsParams(grammar=call_grammar(tools, request.tool_choice, several, asked.schema()))
    return asked


def _of_format(given: dict[str, Any] | None) -> StructuredOutputsParams | None:
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    described = given.get("json_schema")
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
        chat_template_kwargs=template_kwargs(tokenizer, request.chat_template_kwargs or {}),
    )
    return TokensPrompt(prompt=text, prompt_token_ids=encode_within(limit, tokenizer, text, add_special_tokens=False))


def template_kwargs(tokenizer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What a client may tell the template: its own variables, not the arguments of the method that fills it in."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    if taken := sorted(own.keys() & given.keys()):
        raise ApiError(400, f"chat_template_kwargs must not hold {taken[0]!r}: leave it out", "chat_template_kwargs")
    return given
