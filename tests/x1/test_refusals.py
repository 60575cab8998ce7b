"""What a request may not hold, in one table: each is refused with 400 and a sentence that names the field, and takes no place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from folovllm.electives.server.config import ServerConfig
from tests.helpers import tiny_checkpoint
from tests.x1.background import Background, served

C, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
HELLO: Any = [{"role": "user", "content": "a"}]
BASE: dict[str, dict[str, Any]] = {C: {"prompt": "a"}, CHAT: {"messages": HELLO}, TOKENIZE: {}, DETOKENIZE: {}}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | function}]}


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant"} | message]}


def schema(**described: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}} | described}}


QUEUE = "has {} sequences, and the queue holds 16"
ROWS: list[tuple[str, Any, str | None, str]] = [  # address, fields or a whole body, the field that is named, what is said
    # what is no JSON, or none of the fields' types
    (C, b"{", None, "must be a JSON object: "),
    (C, b"[]", None, "must be a JSON object: Expected `object`"),
    *((C, body, None, "must be a JSON object: ") for body in (
        b"", b'{"prompt": "\\ud800"}', b'{"prompt": "a", "\\udc00": 1}', b'{"prompt": "\xff"}',
    )),
    (C, b'{"prompt": ' + b"[" * 100_000, None, "must be a JSON object: "),
    (C, b'{"prompt": "x", "temperature": 1e999}', None, "must be a JSON object: "),
    (C, b"{}", None, "missing required field `prompt`"),
    (C, {"max_tokens": "3"}, "max_tokens", "max_tokens: Expected `int | null`, got `str`"),
    (C, {"stop": [1]}, "stop", r"stop\[0\]: Expected `str`"),
    (C, {"seed": True}, "seed", "Expected `int | null`, got `bool`"),
    (C, {"echo": "yes"}, "echo", "Expected `bool | null`"),
    (C, {"stream_options": {"a": 1}}, "stream_options", "unknown field `a`"),
    *((C, {"prompt": p}, "prompt", "prompt must be a text") for p in (["a", 1], [[1], "a"])),
    *((C, {"prompt": p}, "prompt", r"^prompt\[0\].*: Expected `int") for p in ([1.5], [True], [[[1]]], [{}])),
    # fields that nobody knows, or that are not supported
    (C, {"temprature": 0.1}, "temprature", "unknown field 'temprature' in a completion request"),
    (C, {"tools": [1]}, "tools", "^tools is not supported by this server"),
    (C, {"suffix": "x"}, "suffix", "^suffix is not supported by this server"),
    (CHAT, {"guided_json": {}}, "guided_json", "say structured_outputs"),
    # fields that do not fit together
    (CHAT, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    (CHAT, {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differ"),
    (CHAT, {"stream": False, "stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    (CHAT, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "prompt_logprobs are for whole answers"),
    (CHAT, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "give one"),
    (TOKENIZE, {}, "prompt", "give a prompt or messages"),
    (TOKENIZE, {"prompt": "x", "messages": HELLO}, "prompt", "give a prompt or messages"),
    # values out of range
    (C, {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias must give token ids a number"),
    (C, {"logit_bias": {"999999": 1}}, "logit_bias", "logit_bias must lie between 0 and"),
    (C, {"bad_words": [f"w{i} x{i}" for i in range(200)]}, "bad_words", "bad_words are too many: at most 128"),
    (C, {"prompt_logprobs": 21, "stream": False}, "prompt_logprobs", "is 21, and this engine gives 20 at most"),
    (C, {"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
    (C, {"top_p": 5}, "top_p", "top_p must be above 0"),
    (CHAT, {"logprobs": True, "top_logprobs": 99}, "logprobs", "at most"),
    (DETOKENIZE, {"tokens": [-1]}, "tokens", "outside the vocabulary"),
    # more than each token of an answer may be compared with, or than the context and the queue hold
    *((path, {"stop": [str(i) for i in range(65)]}, "stop", "stop: Expected `array` of length <= 64") for path in (C, CHAT)),
    (C, {"stop": "a" * 1025}, "stop", "stop: Expected `str` of length <= 1024"),
    (C, {"stop": ["a", "b" * 2000]}, "stop", r"stop\[1\]: Expected `str` of length <= 1024"),
    (C, {"stop_token_ids": [5] * 1025}, "stop_token_ids", "Expected `array` of length <= 1024"),
    (C, {"allowed_token_ids": [1] * 300_000}, "allowed_token_ids", "Expected `array` of length <= 262144"),
    (C, {"logit_bias": {str(i): 1 for i in range(70_000)}}, "logit_bias", "Expected `object` of length <= 65536"),
    (DETOKENIZE, {"tokens": [5] * 1_100_000}, "tokens", "Expected `array` of length <= 1048576"),
    *((path, {"messages": HELLO * 260}, None, "at least 260 tokens") for path in (CHAT, TOKENIZE)),
    *((C, {"prompt": p}, None, "prompt is empty") for p in ("", [], ["a", ""], [[5], []])),
    (C, {"prompt": [99_999]}, None, "outside the vocabulary"),
    (C, {"prompt": [5] * 600}, None, "leaves no room"),
    (C, {"prompt": "x" * 50_000}, None, "leaves no room"),
    (C, {"prompt": ["a"] * 5, "n": 4}, None, QUEUE.format(20)),
    (C, {"prompt": [[5]] * 17}, None, QUEUE.format(17)),
    *((path, {"n": 17}, None, QUEUE.format(17)) for path in (C, CHAT)),
    (C, {"prompt": ["a"] * 1000, "n": 1000}, "n", "n is 1000"),  # fewer prompts would not help
    # messages
    (CHAT, {"messages": [{"content": "x"}]}, "messages", r"^messages\[0\]: Object missing required field `role`"),
    (CHAT, said(audio={"id": "x"}), "messages", r"^messages\[1\].audio: Expected `null`"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "'image_url' is not supported"),
    (CHAT, {"messages": [{"role": "user", "contents": "x"}]}, "messages", r"messages\[0\]: a message of 'user' needs content"),
    (CHAT, {"messages": [{"role": "tool", "content": None}]}, "messages", "a message of 'tool' needs content"),
    (CHAT, said(tool_calls="x"), "messages", r"^messages\[1\].tool_calls: Expected `array"),
    (CHAT, said(tool_calls=[{"function": {"name": "f", "arguments": [1]}}]), "messages", "function.arguments: Expected `str"),
    (CHAT, said(tool_calls=[{"function": {"arguments": "{}"}}]), "messages", "function: Object missing required field `name`"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "must not hold 'tokenize'"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "must not hold 'messages'"),
    # tools and forms
    (CHAT, {"tools": [{"type": "x"}]}, "tools", r"^tools\[0\].type: Invalid enum value 'x': it may be 'function'$"),
    (CHAT, tool(parameters={"type": "string"}), "tools", r"^tools\[0\].function.parameters.type: .*: it may be 'object'$"),
    *((CHAT, tool(name=n), "tools", r"^tools\[0\].function.name: Expected `str`") for n in (None, "")),
    *((CHAT, tool(parameters=p), "tools", r"^tools\[0\].function.parameters") for p in (5, [], {"type": ["object", "null"]})),
    (CHAT, tool() | {"tool_choice": "sometimes"}, "tool_choice", "^tool_choice: .* 'sometimes': it may be 'auto', 'none', 'required', an object$"),
    (CHAT, tool() | {"tool_choice": {"type": "function"}}, "tool_choice", "tool_choice: Object missing required field"),
    (CHAT, tool() | {"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "'h', which is none of"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format", "'xml': it may be 'json_object', 'json_schema', 'text'$"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", 'response_format needs "json_schema"'),
    (CHAT, schema(schema={"type": "no"}), "structured_outputs", "JSON schema that cannot be used: Invalid type"),
    (CHAT, schema(strict=1), "response_format", "strict: Expected `bool"),
    (C, {"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unknown field 'regexp'"),
    (C, {"structured_outputs": {"regex": ""}}, "structured_outputs", "regex must be a text that is not empty"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Background]:
    config = ServerConfig(max_queued_requests=16)
    yield from served(config, model=str(tiny_checkpoint()), max_model_len=256, max_num_seqs=2)


@pytest.mark.parametrize(("path", "fields", "param", "says"), ROWS, ids=[f"{i} {row[2]}" for i, row in enumerate(ROWS)])
def test_what_cannot_be_is_said(server: Background, path: str, fields: Any, param: str | None, says: str) -> None:
    """For streams, too: before the request is admitted."""
    bodies = [fields if isinstance(fields, bytes) else BASE[path] | fields]
    if path in (C, CHAT) and isinstance(fields, dict) and "stream" not in fields:
        bodies.append(bodies[0] | {"stream": True})
    for body in bodies:
        status, told = server.ask(path, body)
        error = told["error"]
        assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert re.search(says, error["message"]), error["message"]
        assert server.engine.num_open == 0


A_CHAT = '{"messages": [{"role": "user", "content": "a"}], "logprobs": true, '
A_COMPLETION = '{"prompt": "a", '
# (path, the body up to the number, its end, the field that the error names)
NUMBERS = [
    *(("/v1/completions", f'{A_COMPLETION}"{name}": ', "}", name) for name in (
        "priority", "n", "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens",
        "temperature", "presence_penalty", "repetition_penalty",
    )),
    *(("/v1/completions", f'{A_COMPLETION}"{name}": [', "]}", name) for name in ("stop_token_ids", "allowed_token_ids")),
    ("/v1/completions", f'{A_COMPLETION}"logit_bias": {{"', '": 1}}', "logit_bias"),
    ("/v1/completions", f'{A_COMPLETION}"logit_bias": {{"5": ', "}}", "logit_bias"),
    ("/v1/completions", '{"prompt": [5, ', "]}", None),
    ("/v1/completions", '{"prompt": [[5], [', "]]}", None),
    *(("/v1/chat/completions", f'{A_CHAT}"{name}": ', "}", named) for name, named in (
        ("priority", "priority"), ("n", "n"), ("top_logprobs", "logprobs"), ("max_completion_tokens", "max_tokens"),
    )),
    ("/detokenize", '{"tokens": [', "]}", "tokens"),
]  # fmt: skip


@pytest.mark.parametrize(
    "number", [2**63, -(2**63) - 1, 2**64, 10**400, -(10**400)], ids=lambda n: f"{float(str(n)[:30]):.0e}"
)
def test_numbers_beyond_64_bits(server: Background, number: int) -> None:
    """In any field that has numbers: 400, which names the field. No place in the queue is lost."""
    for path, begin, end, field in NUMBERS:
        status, said = server.ask(path, f"{begin}{number}{end}".encode())
        assert status == 400, f"{begin}{end} is the client's fault: {said}"
        assert field is None or said["error"]["param"] == field, f"{begin}{end} is not named: {said}"
    longest = {"prompt": "a", "max_tokens": 1, "priority": 2**63 - 1 if number > 0 else -(2**63)}
    assert server.ask("/v1/completions", longest)[0] == 200, "it fits"
    server.wait_until_idle()


def test_a_request_that_cannot_be_handed_over_takes_no_place(
    server: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of its prompts cannot be sent: the first one's place is given back, too."""
    transport, sent = server.engine._transport, list[Any]()

    def send(command: Any, send: Any = transport.send) -> None:
        sent.append(command)
        send(command if len(sent) != 2 else 1 // 0)

    with monkeypatch.context() as patch:
        patch.setattr(transport, "send", send)
        status, _ = server.ask("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 60})
    assert status == 500
    server.wait_until_idle()
