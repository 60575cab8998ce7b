"""The `openai` package and structured output: parsed documents and tools, streaming and not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from folovllm.electives.server.config import ServerConfig
from folovllm.models.files import resolve_model
from tests.x1.background import Background, served

MODEL = "little"
QUESTION: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "Look it up.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATE = (  # as Qwen's, in short
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments}"
    " | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


class Fish(BaseModel):
    """What is to be answered."""

    kind: Literal["carp", "eel"]
    length: int = Field(ge=1, le=99)
    colours: list[Literal["red", "green"]] = Field(max_length=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a template that shows tools."""
    folder = tmp_path_factory.mktemp("model") / "little"
    shutil.copytree(resolve_model("stories-5m"), folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Background]:
    yield from served(ServerConfig(served_model_name=[MODEL]), model=str(model), max_model_len=512)


@pytest.fixture
def client(server: Background) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, "seed": 1, "max_tokens": 200} | fields


def exactly(text: str, **more: Any) -> dict[str, Any]:
    """Fields with which the answer is this text."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}, **more}}


def put_together(chunks: list[Any]) -> tuple[str, list[list[str]], str]:
    """Content, calls and finish reason of a stream."""
    calls: dict[int, list[str]] = {}
    content = ""
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for piece in delta.tool_calls or ():
            if piece.id:
                calls[piece.index] = [piece.function.name, ""]
            calls[piece.index][1] += piece.function.arguments
    return content, list(calls.values()), chunks[-1].choices[0].finish_reason


class TestDocuments:
    def test_parsed(self, client: OpenAI) -> None:
        choice = client.chat.completions.parse(**chat(response_format=Fish)).choices[0]
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Fish)
        with client.chat.completions.stream(**chat(response_format=Fish)) as stream:
            assert [*stream] and isinstance(stream.get_final_completion().choices[0].message.parsed, Fish)

    def test_formats(self, client: OpenAI) -> None:
        """None; a schema that is not strict, whose `uniqueItems` is passed over; any object; and the server's own form of it."""

        def said(**described: Any) -> str:
            return client.chat.completions.create(**chat(max_tokens=20, **described)).choices[0].message.content or ""

        assert said(response_format={"type": "text"})
        loose: Any = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": True}
        for more in ({}, {"strict": None}, {"strict": False}):
            described = {"name": "x", "schema": loose} | more
            assert isinstance(json.loads(said(response_format={"type": "json_schema", "json_schema": described})), list)
        assert said(response_format={"type": "json_object"}).startswith("{")
        assert said(extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}).isdigit()


class TestTools:
    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
    def test_required(self, client: OpenAI, choice: Any) -> None:
        """Any of them, or the one that is named, with arguments that are valid; whole and in a stream alike."""
        asked = chat(tools=TOOLS, tool_choice=choice, max_tokens=400, parallel_tool_calls=False)
        answer = client.chat.completions.create(**asked).choices[0]
        (call,) = answer.message.tool_calls or ()
        assert call.type == "function" and call.id.startswith("call_")
        schema = WEATHER if call.function.name == "get_weather" or choice != "required" else {"type": "object"}
        jsonschema.validate(json.loads(call.function.arguments), schema)
        said = answer.message.content or "", [[call.function.name, call.function.arguments]], answer.finish_reason
        assert put_together(list(client.chat.completions.create(**asked, stream=True))) == said
        assert said[0] == "" and said[2] == "tool_calls"

    def test_auto(self, client: OpenAI) -> None:
        """What the model says is read; a document may stand in place of a call."""
        create = client.chat.completions.create
        two = 'Sure.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n' + (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'
        )
        calls = [["now", "{}"], ["get_weather", '{"city": "Rome", "days": 2}']]
        choice = create(**chat(tools=TOOLS, **exactly(two))).choices[0]
        found = [[call.function.name, call.function.arguments] for call in choice.message.tool_calls or ()]
        assert (choice.message.content, found, choice.finish_reason) == ("Sure.", calls, "tool_calls")
        chunks = list(create(**chat(tools=TOOLS, stream=True, **exactly(two))))
        assert put_together(chunks) == ("Sure.", calls, "tool_calls")
        assert len([c for c in chunks if c.choices[0].delta.tool_calls]) > 6, "arguments come as they are drawn"
        for text, more in (("No.", {}), ('<tool_call>\n{"name": "now"}\n</tool_call>', {"tool_choice": "none"})):
            message = create(**chat(tools=TOOLS, **more, **exactly(text))).choices[0].message
            assert (message.content, message.tool_calls) == (text, None)
        schema = Fish.model_json_schema() | {"additionalProperties": False}
        fish = {"type": "json_schema", "json_schema": {"name": "fish", "schema": schema}}
        either = create(**chat(tools=TOOLS[:1], response_format=fish, seed=0)).choices[0].message
        assert either.tool_calls or Fish.model_validate_json(either.content or "")

    def test_the_openai_way_to_stream(self, client: OpenAI) -> None:
        """Log-probabilities come beside the pieces, of each token."""
        asked = chat(tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, logprobs=True)
        asked["stream_options"] = {"include_usage": True}
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion()
        choice, count = answer.choices[0], answer.usage.completion_tokens
        assert len(choice.logprobs.content) == count
        assert {"tool_calls.function.arguments.delta", "logprobs.content.delta"} <= kinds and choice.message.tool_calls

    def test_a_conversation_with_tools(self, client: OpenAI, server: Background) -> None:
        """The template sees the tools, the calls and what they gave."""
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": 1}'}}
        messages: Any = [
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "12:30"},
        ]
        assert client.chat.completions.create(**chat(messages=messages, tools=TOOLS, max_tokens=3)).choices
        ids = client.post("/../tokenize", cast_to=object, body={"model": MODEL, "messages": messages, "tools": TOOLS})
        text = server.engine.tokenizer.decode(ids["tokens"])  # type: ignore[index]
        assert '"name": "get_weather"' in text and '"arguments": {"zone": 1}' in text and "12:30" in text
