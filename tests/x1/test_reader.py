"""Thoughts and tool calls in an answer's text: read whole or torn anywhere, the same comes out."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.outputs import CompletionOutput
from folovllm.server.errors import ApiError
from folovllm.server.messages_in import checked
from folovllm.server.reader import AnswerReader
from folovllm.server.reasoning import ReasoningSplitter
from folovllm.server.replies import ChatMessage
from folovllm.server.tool_calls import ToolCallParser
from folovllm.server.tools import call_grammar, offered

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'


def torn(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces."""
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def read(pieces: list[str], reader: AnswerReader, finish: str = "stop") -> tuple[ChatMessage, str | None]:
    """What the pieces add up to, put together as a client does it."""
    content, thought, calls, reason = "", "", {}, None
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        news, reason = reader.news(CompletionOutput(0, piece, [], finish_reason=finish if last else None))
        content += news.content if isinstance(news.content, str) else ""
        thought += news.reasoning_content or ""
        for call in news.tool_calls or ():
            assert call.function is not None
            if call.index not in calls:
                assert call.id and call.type == "function" and call.function.name, "the first piece says who is called"
                calls[call.index] = [call.function.name, ""]
            else:
                assert call.id is None and call.function.name is None
            calls[call.index][1] += call.function.arguments
    assert list(calls) == list(range(len(calls)))
    return ChatMessage("assistant", content, thought or None, list(calls.values()) or None), reason  # type: ignore[arg-type]


def reader(parser: str | None = None, prompt: str = "", tools: bool = True, only_one: bool = False) -> AnswerReader:
    splitter = None if parser is None else ReasoningSplitter(parser, prompt)
    return AnswerReader(splitter, ToolCallParser(only_one) if tools else None)


ANSWERS = [  # parser, prompt, text, thought, content, calls
    (None, "", "Just text.", None, "Just text.", None),
    (None, "", CALL, None, "", [["f", '{"a": [1, "}"]}']]),
    (None, "", f"Let me see.\n{CALL}\n{CALL}\n", None, "Let me see.", [["f", '{"a": [1, "}"]}']] * 2),
    (None, "", '<tool_call>{"arguments": {"b": 1}, "name": "g"}</tool_call>', None, "", [["g", '{"b": 1}']]),
    (None, "", '<tool_call>{"name": "g", "arguments": "{\\"b\\": 2}"}</tool_call>', None, "", [["g", '{"b": 2}']]),
    (None, "", '<tool_call>{"name": "g", "parameters": {}}</tool_call>', None, "", [["g", "{}"]]),
    (None, "", '<tool_call>{"name": "g"}</tool_call>', None, "", [["g", "{}"]]),
    (None, "", "<tool_call>no JSON</tool_call> then", None, "<tool_call>no JSON</tool_call> then", None),
    (None, "", "a <tool_cal and < tool", None, "a <tool_cal and < tool", None),
    (None, "", 'x <tool_call>\n{"na', None, 'x<tool_call>\n{"na', None),
    (None, "", f"{CALL} and after", None, " and after", [["f", '{"a": [1, "}"]}']]),
    (None, "", '<tool_call>\n{"name": "é\\"n", "arguments": {"s": "\\\\"}}\n</tool_call>', None, "", [['é"n', '{"s": "\\\\"}']]),
    (None, "", '<tool_call>{"name": "g", "arguments": {"s": "\\"}"}}</tool_call>', None, "", [["g", '{"s": "\\"}"}']]),
    ("qwen3", "", "<think>\nHm, <b>.\n</think>\n\nYes.", "Hm, <b>.\n", "Yes.", None),
    ("qwen3", "", "\n<think>Hm.</think>Yes.", "Hm.", "Yes.", None),
    ("qwen3", "", "No thought.", None, "No thought.", None),
    ("qwen3", "", " <thin", None, " <thin", None),
    ("qwen3", "...<think>\n", "Hm.</think>\n\nYes.", "Hm.", "Yes.", None),
    ("qwen3", "...<think>\n\n</think>\n\n", "Yes.", None, "Yes.", None),
    ("qwen3", "", "<think>Hm. It <tool_call></thi", "Hm. It <tool_call></thi", "", None),
    ("deepseek_r1", "", "Hm.</think>Yes.", "Hm.", "Yes.", None),
    ("deepseek_r1", "", "<think>\nHm.</think>Yes.", "Hm.", "Yes.", None),
    ("deepseek_r1", "", "Hm.", "Hm.", "", None),
    ("qwen3", "", f"<think>\nCall f.\n</think>\n\n{CALL}", "Call f.\n", "", [["f", '{"a": [1, "}"]}']]),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "prompt", "text", "thought", "content", "calls"), ANSWERS)
@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_torn_anywhere(
    parser: str | None, prompt: str, text: str, thought: str | None, content: str, calls: Any, cuts: list[int]
) -> None:
    message, reason = read(torn(text, cuts), reader(parser, prompt))
    assert (message.reasoning_content, message.content, message.tool_calls) == (thought, content, calls)
    assert reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(("parser", "prompt", "text", "thought", "content", "calls"), ANSWERS)
def test_letter_by_letter_and_whole(
    parser: str | None, prompt: str, text: str, thought: str | None, content: str, calls: Any
) -> None:
    message, _ = read([*text, ""], reader(parser, prompt))
    assert (message.reasoning_content, message.content, message.tool_calls) == (thought, content, calls)
    whole, reason = reader(parser, prompt).whole(CompletionOutput(0, text, [], finish_reason="stop"))
    assert [[c.function.name, c.function.arguments] for c in whole.tool_calls or ()] == (calls or [])  # type: ignore[union-attr]
    assert (whole.reasoning_content, whole.content or "") == (thought, content)
    assert all(call.index is None and call.id for call in whole.tool_calls or ())
    assert reason == ("tool_calls" if calls else "stop")


@given(
    text=st.text(st.sampled_from(list('<tool_call>/thinkn{}":, \n')), max_size=80), cuts=st.lists(st.integers(0, 80))
)
def test_no_text_is_lost_or_made(text: str, cuts: list[int]) -> None:
    """Whatever the text: torn or whole it reads the same, and what is no call stays content, but for space."""
    whole, _ = read([text], reader("qwen3"))
    assert read(torn(text, cuts), reader("qwen3"))[0] == whole
    if whole.tool_calls is None and whole.reasoning_content is None:
        assert "".join(str(whole.content).split()) == "".join(text.split())


def test_an_answer_that_is_cut_off_in_a_call() -> None:
    """What has come of the arguments is there, and the reason says that it is not all."""
    message, reason = read([CALL[:48]], reader(), finish="length")
    assert (message.tool_calls, reason) == ([["f", CALL[39:48]]], "length")


def test_only_one_call() -> None:
    message, _ = read([f"{CALL}\n{CALL}"], reader(only_one=True))
    assert message.tool_calls is not None and len(message.tool_calls) == 1


class TestTools:
    TOOLS = (
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "g"}},
    )

    @pytest.mark.parametrize(
        ("tools", "choice", "says"),
        [
            ([{"type": "x"}], None, "each of the tools must be"),
            ([{"type": "function", "function": {}}], None, "each of the tools must be"),
            ([{"type": "function", "function": {"name": "f", "parameters": 5}}], None, "each of the tools must be"),
            (TOOLS, "sometimes", "tool_choice must be none, auto, required or"),
            (TOOLS, {"type": "function"}, "tool_choice must be"),
            (TOOLS, {"type": "function", "function": {"name": "h"}}, "names 'h', which is none of the tools"),
            (None, "required", "tool_choice needs tools"),
        ],
    )
    def test_what_cannot_be(self, tools: Any, choice: Any, says: str) -> None:
        with pytest.raises(ApiError, match=says):
            offered(tools, choice)

    def test_none_is_offered(self) -> None:
        assert offered(list(self.TOOLS), "none") == [] == offered(None, "auto") == offered([], "none")
        assert len(offered(list(self.TOOLS), None)) == 2

    def test_grammar(self) -> None:
        """Each function has its own schema; a named one is called once."""
        lines = call_grammar(list(self.TOOLS), "required", True).splitlines()
        assert lines[:3] == ["start: calls", 'calls: call ("\\n" call)*', "call: call_0 | call_1"]
        named = call_grammar(list(self.TOOLS), {"function": {"name": "g"}}, True)
        assert "call: call_0\n" in named and '"f' not in named and "calls: call\n" in named

    def test_messages(self) -> None:
        """Arguments come as text, and templates want an object."""
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": 1})}}
        told = checked({"role": "assistant", "content": None, "tool_calls": [call]})
        assert told["content"] == "" and told["tool_calls"][0]["function"]["arguments"] == {"a": 1}
        assert checked({"role": "tool", "tool_call_id": "1", "content": "12"})["content"] == "12"
        for wrong in ("x", [5], [{"function": {"name": "f", "arguments": "{"}}], [{"function": {"arguments": "{}"}}]):
            with pytest.raises(ApiError, match="tool_calls in a message must be"):
                checked({"role": "assistant", "tool_calls": wrong})
        for wrong in ({"role": "user", "contents": "a slip of the pen"}, {"role": "tool", "content": None}):
            with pytest.raises(ApiError, match="needs content"):
                checked(wrong)
