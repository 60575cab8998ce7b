"""Thoughts and tool calls in an answer's text: read whole or torn anywhere, the same comes out."""

from __future__ import annotations

import itertools
import re
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.server.reasoning import ReasoningSplitter
from folovllm.electives.server.replies import MessageReader
from folovllm.electives.server.requests import checked
from folovllm.electives.server.tool_calls import ToolCallParser

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}"]}}\n</tool_call>'


def torn(text: str, cuts: list[int]) -> list[str]:
    """The text in pieces."""
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


Parts = tuple[str | None, str, list[list[str]] | None]


def read(pieces: list[str], reader: MessageReader, finish: str = "stop") -> tuple[Parts, str | None]:
    """Thought, content and calls that the pieces add up to, put together as a client does it; and the finish reason."""
    content, thought, calls, reason = "", "", dict[int, list[str]](), None
    for i, piece in enumerate(pieces):
        news, reason = reader.read(piece, finish if i == len(pieces) - 1 else None)
        content += news.get("content", "")
        thought += news.get("reasoning_content", "")
        for call in news.get("tool_calls", ()):
            if call["index"] not in calls:
                assert call["id"] and call["type"] == "function" and call["function"]["name"], (
                    "first it says who is called"
                )
                calls[call["index"]] = [call["function"]["name"], ""]
            else:
                assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
            calls[call["index"]][1] += call["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return (thought or None, content, list(calls.values()) or None), reason


def read_whole(text: str, *how: Any) -> tuple[Parts, str | None]:
    """The same of an answer that comes in one piece, by a reader that knows it."""
    message, reason = reader(*how, is_whole=True).read(text, "stop")
    assert all("index" not in call and call["id"] for call in message.get("tool_calls", ()))
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return (message.get("reasoning_content"), message.get("content", ""), calls or None), reason


def reader(
    parser: str | None = None, prompt: str = "", tools: bool = True, only_one: bool = False, is_whole: bool = False
) -> MessageReader:
    splitter = None if parser is None else ReasoningSplitter(parser, prompt)
    return MessageReader(splitter, ToolCallParser(only_one, is_whole) if tools else None)


F, G = '{"name": "f", "arguments": {}}', '{"arguments": {"b": 1}, "name": "g"}'
NO_CALLS = [  # arguments that are no object, and names that are none: text, as broken JSON is
    *(f'<tool_call>{{"name": "f", "arguments": {x}}}</tool_call>' for x in ("null", "[1]", '"x"', '"[]"', "NaN", "1", "true")),
    *(f'<tool_call>{{"arguments": {x}, "name": "f"}}</tool_call>' for x in ("null", '{"a": NaN}', '{"a": 1e999}', '"{"')),
    *(f'<tool_call>{{"name": {x}, "arguments": {{}}}}</tool_call>' for x in ("5", "null", '""', r'"\x"', r'"\ud800"')),
    "<tool_call></tool_call>",
    "<tool_call> ",
]  # fmt: skip
ANSWERS = [  # parser, prompt, text, thought, content, calls
    (None, "", "Just text.", None, "Just text.", None),
    (None, "", CALL, None, "", [["f", '{"a": [1, "}"]}']]),
    (None, "", f"Let me see.\n{CALL}\n{CALL}\n", None, "Let me see.", [["f", '{"a": [1, "}"]}']] * 2),
    (None, "", '<tool_call>{"arguments": { "b":1e0}, "name": "g"}</tool_call>', None, "", [["g", '{ "b":1e0}']]),
    (None, "", '<tool_call>{"name": "g", "arguments": "{\\"b\\": 2}"}</tool_call>', None, "", [["g", '{"b": 2}']]),
    (None, "", '<tool_call>{"name": "g", "parameters": {}}</tool_call>', None, "", [["g", "{}"]]),
    (None, "", '<tool_call>{"name": "g"}</tool_call>', None, "", [["g", "{}"]]),
    (None, "", '<tool_call>{"name":"g"}\n{"name":"f"}</tool_call>', None, "", [["g", "{}"], ["f", "{}"]]),
    (None, "", '<tool_call>{"name":"g","arguments":"{}"} and</tool_call>', None, " and", [["g", "{}"]]),
    (None, "", f"<tool_call>{F} <b>}}\n</tool_call>", None, " <b>}", [["f", "{}"]]),
    (None, "", "<tool_call>no JSON</tool_call> then", None, "<tool_call>no JSON</tool_call> then", None),
    (None, "", "a <tool_cal and < tool", None, "a <tool_cal and < tool", None),
    (None, "", 'x <tool_call>\n{"na', None, 'x <tool_call>\n{"na', None),
    (None, "", f"{CALL} and after ", None, " and after ", [["f", '{"a": [1, "}"]}']]),
    (None, "", "<tool_call>x<tool_call></tool_call>", None, "<tool_call>x<tool_call></tool_call>", None),
    (None, "", f"a <tool_call>{F}\n{G}, {F}}}</tool_call>b", None, "a,}b", [["f", "{}"], ["g", '{"b": 1}'], ["f", "{}"]]),
    (None, "", f"<tool_call>{G}{{oops}}</tool_call>", None, "{oops}", [["g", '{"b": 1}']]),
    (None, "", '<tool_call>{"arguments": {"s": "</tool_call>"}, "name": "f"}', None, "", [["f", '{"s": "</tool_call>"}']]),
    *((None, "", text, None, text, None) for text in NO_CALLS),
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
def test_letter_by_letter_and_whole(
    parser: str | None, prompt: str, text: str, thought: str | None, content: str, calls: Any
) -> None:
    reason = "tool_calls" if calls else "stop"
    assert read([*text, ""], reader(parser, prompt)) == ((thought, content, calls), reason)
    assert read_whole(text, parser, prompt) == ((thought, content, calls), reason)


BROKEN = (
    '{"x": NaN}',
    "{x: 1}",
    '{"x": tru}',
    '{"x": 1,}',
    '{"x": [1}]}',
    '{"x": 1',
    '{"a": 1}</tool_call>b',
    '{"a": 1</tool_call>b',
)


@pytest.mark.parametrize("arguments", BROKEN)
def test_arguments_that_are_no_json(arguments: str) -> None:
    """A whole answer has no call, and the text as it stands. A stream has delivered them by the time it is known."""
    text = f'So: <tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert read_whole(text) == ((None, text, None), "stop")
    (_, _, calls), reason = read([*text, ""], reader())
    assert calls is not None and calls[0][0] == "f" and reason == "tool_calls"


FRAGMENTS = [  # of answers: tags and calls, torn and whole, and what stands around them
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<thi", "nk>", "</tool", "_call>", "<", ">", '{"name": "f", ',
    '"arguments": {', '"a": "}', '"', "\\", "}", "}}", F, G, "NaN", "null", "[", " ", "\n", "word", "é",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
PROMPTS = st.sampled_from(["", "q<think>\n", "q<think>\n\n</think>\n\n"])
CUTS = st.lists(st.integers(0, 120))


@given(parser=st.sampled_from([None, "qwen3", "deepseek_r1"]), prompt=PROMPTS, text=TEXTS, cuts=CUTS)
def test_no_text_is_lost_or_made(parser: str | None, prompt: str, text: str, cuts: list[int]) -> None:
    """Whatever the text: torn or whole it reads the same, and without a thought or a call it is the content as it stands."""
    whole, _ = read([text], reader(parser, prompt))
    assert read(torn(text, cuts), reader(parser, prompt))[0] == whole
    if parser is None and whole[2] is None:
        assert whole[1] == text
    assert all(arguments.startswith("{") for _, arguments in whole[2] or ())


def thought_and_answer(parser: str, begun: str, text: str) -> tuple[str, str]:
    """By the rule: a thought goes from the opening tag to the first closing one, and the last tag before the text decides."""
    tags = re.findall("</?think>", begun)
    if tags and tags[-1] == "</think>":
        return "", text.lstrip("\n")
    opened = text.lstrip().startswith("<think>")
    if not (tags or opened or parser == "deepseek_r1"):
        return "", text
    thought, _, answer = (text.lstrip().removeprefix("<think>") if opened else text).partition("</think>")
    return thought.lstrip("\n"), answer.lstrip("\n")


@given(parser=st.sampled_from(["qwen3", "deepseek_r1"]), prompt=PROMPTS, text=TEXTS, cuts=CUTS)
def test_a_thought_by_the_rule(parser: str, prompt: str, text: str, cuts: list[int]) -> None:
    (thought, content, _), _ = read(torn(text, cuts), reader(parser, prompt, tools=False))
    assert (thought or "", content) == thought_and_answer(parser, prompt, text)


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("begun", "text", "thought", "content"),
    [
        ("<think>x</think>The answer is ", "5<think>", "", "5<think>"),
        ("<think>x</think>", "\n5", "", "5"),
        ("<think>x", " y</think>5", " y", "5"),
        ("<think>x</thi", "nk>5", "", "5"),
        ("a</think>b<think>c ", "d</think>5", "d", "5"),
    ],
)
def test_a_thought_that_the_client_began(parser: str, begun: str, text: str, thought: str, content: str) -> None:
    """The last tag in what the client wrote decides, and no tag of an earlier message; nor does another text say otherwise."""
    for head in ("user: <think> </think>\nassistant: ", "user: a</think>\nassistant: <think>\n\n</think>\n\n"):
        splitter = ReasoningSplitter(parser, head + begun, begun)
        assert read([*text, ""], MessageReader(splitter, None))[0] == (thought or None, content, None)


def test_a_long_call_costs_what_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each letter of a name or of a body is looked at once, and its beginning is matched once, however small the pieces are."""
    matched = list[int]()
    head = Mock(fullmatch=lambda text: matched.append(len(text)))
    monkeypatch.setattr("folovllm.electives.server.tool_calls.HEAD", head)
    for text in (
        '<tool_call>{"name": "' + "n" * 20_000,
        f'<tool_call>{{"x": {G * 500}',
        "<tool_call>" + " " * 9000,
        " " * 9000,
    ):
        parser = ToolCallParser()
        for letter in text:
            parser.feed(letter)
            assert len(parser._text) - parser._at < len("</tool_call>"), "more than a tag is looked at again"
        assert parser.feed("", last=True)[0] == text
    assert len(matched) == 1 and matched[0] < 20


def test_an_answer_that_is_cut_off_in_a_call() -> None:
    """What has come of the arguments is there, and the reason says that it is not all."""
    assert read([CALL[:48]], reader(), finish="length") == ((None, "", [["f", CALL[39:48]]]), "length")


def test_only_one_call() -> None:
    text = f"{CALL}\n{CALL}"
    assert len(read([text], reader(only_one=True))[0][2] or ()) == 1
    assert len(read_whole(text, None, "", True, True)[0][2] or ()) == 1


@pytest.mark.parametrize("arguments", ['{"a": "cut o', "[1]", "null", "9" * 5000, "[" * 9000])
def test_a_call_that_was_cut_stays_text(arguments: str) -> None:
    """In a message, where templates want an object: the conversation goes on, and the template gets what the model wrote."""
    call = {"function": {"name": "f", "arguments": arguments}}
    (told,) = checked([{"role": "assistant", "tool_calls": [call]}])
    assert told["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
