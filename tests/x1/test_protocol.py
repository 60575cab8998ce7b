"""What requests may hold, how messages travel, what flags may say: without a server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from folovllm.electives.server.config import ServerConfig
from folovllm.electives.server.errors import ApiError
from folovllm.electives.server.messages import Add, Delta, SchedulerStats, Step, decode_command, decode_message, encode
from folovllm.electives.server.metrics import Histogram
from folovllm.electives.server.protocol import ChatRequest, CompletionRequest, parse
from folovllm.electives.server.requests import chat_params, completion_params, prompts_of
from folovllm.sampling_params import RequestOutputKind, SamplingParams
from tests.x1.scripted import request_of


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "x"} | fields).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": [{"role": "user", "content": "x"}]} | fields).encode(), ChatRequest)


def test_the_forms_of_a_prompt() -> None:
    for prompt, prompts in (
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ):
        assert prompts_of(completion(prompt=prompt)) == prompts


def test_defaults() -> None:
    """A completion ends after 16 tokens, as OpenAI's; a chat's answer may fill the context; the model may recommend else."""
    assert completion_params(completion(), {}).max_tokens == 16
    assert chat_params(chat(), {}).max_tokens is None
    params = chat_params(chat(top_k=5), {"temperature": 0.6, "top_k": 20, "max_tokens": 99})
    assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 5, 99)
    asked = ({"logprobs": True, "top_logprobs": 4}, {"logprobs": True}, {})
    assert [chat_params(chat(**fields), {}).logprobs for fields in asked] == [4, 0, None]


def test_every_field_arrives() -> None:
    fields: Any = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "seed": 5, "max_tokens": 9, "min_tokens": 2,
        "stop": ["a"], "stop_token_ids": [3], "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "truncate_prompt_tokens": 4, "logit_bias": {"5": 1.0}, "bad_words": ["a b"],
        "allowed_token_ids": [5, 6],
    }  # fmt: skip
    params = completion_params(completion(**fields, logprobs=3, stream=True), {})
    assert params == SamplingParams(**fields, logprobs=3, output_kind=RequestOutputKind.DELTA)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    """And unknown ones are passed over where the server is told so, but not those that ask for something."""
    chat(
        tools=[],
        response_format={"type": "text"},
        logit_bias=None,
        echo=False,
        tool_choice="none",
        user="me",
        store=True,
    )
    body = b'{"prompt": "x", "temprature": 0.1, "tulls": [1]}'
    assert parse(body, CompletionRequest, ignore_unknown=True) == completion()
    with pytest.raises(ApiError, match="tools is not supported"):
        parse(body.replace(b"tulls", b"tools"), CompletionRequest, ignore_unknown=True)


def test_the_grammar_of_calls() -> None:
    """As many as the model likes, of any tool; a named one is called once."""
    tools = [{"type": "function", "function": {"name": name}} for name in "fg"]

    def grammar(choice: Any) -> str:
        described = chat_params(chat(tools=tools, tool_choice=choice), {}).structured_outputs
        return str(described and described.grammar)

    assert grammar("required").startswith('start: calls\ncalls: call ("\\n" call)*\ncall: call_0 | call_1\n')
    named = grammar({"type": "function", "function": {"name": "g"}})
    assert (
        named.startswith("start: calls\ncalls: call\ncall: call_0\n") and '\\"g\\"' in named and '\\"f\\"' not in named
    )


def test_messages_there_and_back() -> None:
    """NumPy's numbers are numbers too."""
    params = SamplingParams(n=2, stop=["a"], seed=2**62, max_tokens=None, temperature=np.float32(0.5))
    more = {"bad_words": ((5, 6), (7,)), "eos_token_ids": frozenset({1, 2}), "priority": -3, "cache_salt": "salt"}
    command = Add(1, request_of(1, [1, 2], params, **more))
    assert decode_command(encode(command)) == command
    message = Step([Delta(1, 0, [5], "stop", 3, [[(5, -0.5, 1), (6, -1.5, 2)]])], SchedulerStats(1, 2))
    assert decode_message(encode(message)) == message
    add = Add(1, request_of(1, [1], SamplingParams(seed=np.int64(3), stop_token_ids=[np.int32(4)])))
    assert decode_command(encode(add)).request.params.stop_token_ids == [4]


ORIGINS = ("page.test", "", "http://a/", "https://", "ftp://x", "file://x", "http://é", "http://a:65536")
FLAGS: dict[str, tuple[str, list[Any]]] = {
    "allowed_host": ("must be a name as", [["http://x"], [""], ["page.test:80"]]),
    "inspector_host": ("must be a name as", [["http://x"]]),
    "api_key": ("must be printable", [[""], ["\n"], [" k"], ["k\n"], ["é"]]),
    "served_model_name": ("must be printable", [[""], [" x"], ["a", "b\n"]]),
    "cors_origin": ("must be an origin as", [[origin] for origin in ORIGINS]),
    "port": ("between 0 and 65535", [70_000]),
    "max_queued_requests": ("at least 1", [0]),
    "max_body_size": ("at least 1", [0]),
    "drain_seconds": ("0 or more", [-1.0]),
    "grammar_seconds": ("above 0", [0.0]),
    "grammar_memory": ("at least 1", [0]),
    "reasoning_parser": ("one of qwen3, deepseek_r1", ["gpt"]),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_out_of_range_or_that_could_match_nothing(flag: str) -> None:
    says, values = FLAGS[flag]
    for value in values:
        with pytest.raises(ValueError, match=f"{flag}.*{says}"):
            ServerConfig(**{flag: value})


def test_flags_as_they_may_be() -> None:
    origins = ["*", "null", "HTTP://page:80", "https://page:80", "chrome-extension://x", "https://a:443"]
    config = ServerConfig(allowed_host=["*", "gpu-box", "a.b_c"], cors_origin=origins, api_key=["a b", "k"])
    # a browser leaves the usual port out
    assert config.cors_origin[2:] == ["http://page", "https://page:80", "chrome-extension://x", "https://a"]


def test_a_histogram_counts_what_is_at_most_a_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.record(value)
    assert (histogram.counts, histogram.sum) == ([2, 1, 1], 12.0)
