"""A model that says given texts, behind a server: thoughts, their end in the middle of a token, half characters, the last token that fits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from folovllm.electives.server.config import ServerConfig
from tests.x1.background import Background, events_in, served
from tests.x1.reciting import END, Piece, reciter

SMILE = "\U0001f600".encode()
LIMIT = 64
TEXTS: dict[str, list[Piece]] = {
    "nested": ["one ", "<think>", " two ", "</think>", "three"],
    "itself": ["<thi", "nk>\n", "four ", "<think", "> five", "</think", ">\n\n", "six <think> x"],
    "question": ["Quest", "ion: so?", "</", "think>Yes"],
    "object": ["well", "</thi", "nk>{", '"a":', '"x"', "}"],
    "lines": ["um</think>\n", '{"a"', ': "y', '"}'],
    "smile": ["ok", *(bytes([byte]) for byte in SMILE), " end"],
    "half": ["Half ", b"\xe6\x9c"],
    "words": [" Hello", " big", " world"],
}
NUMBER = {name: i for i, name in enumerate(TEXTS)}
OBJECT = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    model = reciter(tmp_path_factory.mktemp("model") / "bytes", list(TEXTS.values()), ("", "<think>"))
    yield from served(ServerConfig(reasoning_parser="qwen3"), model=str(model), max_model_len=LIMIT)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    texts = [[b"\xf0", b"\x9f", b"\x98", b"\x80", " smile"], TEXTS["words"]]
    model = reciter(tmp_path_factory.mktemp("model") / "pieces", texts, pieces=True)
    with Background(model=str(model), max_model_len=LIMIT) as server:
        yield server


def post(server: Background, path: str, **fields: Any) -> tuple[int, Any]:
    """The status, and the answer, the list of a stream's chunks, or an error's message."""
    status, said = server.ask(path, {"temperature": 0, "max_tokens": 30} | fields)
    if status != 200:
        return status, said["error"]["message"]
    return status, events_in(said) if fields.get("stream") else said


def complete(server: Background, prompt: Any, **fields: Any) -> Any:
    """The first choice of a completion."""
    status, said = post(server, "/v1/completions", prompt=prompt, **fields)
    assert status == 200, said
    return said["choices"][0]


def chat(server: Background, prompt: str, *more: dict[str, Any], **fields: Any) -> Any:
    """The first choice of an answer, which is the same in a stream."""
    asked = {"messages": [{"role": "user", "content": prompt}, *more], **fields}
    status, said = post(server, "/v1/chat/completions", **asked)
    assert status == 200, said
    choice = said["choices"][0]
    deltas = [c["choices"][0]["delta"] for c in post(server, "/v1/chat/completions", stream=True, **asked)[1]]
    for name in ("content", "reasoning_content"):
        streamed = "".join(delta.get(name) or "" for delta in deltas)
        assert streamed == (choice["message"].get(name) or ""), f"the {name} differs in a stream"
    return choice


def parts(choice: Any) -> tuple[str | None, str | None]:
    return choice["message"].get("reasoning_content"), choice["message"]["content"]


class TestThoughts:
    def test_tags_in_it_are_text(self, server: Background) -> None:
        """Stop strings are found in it; and the token that ends it brings new lines at most before a form."""
        for text, start, thought, content, more in (
            ("nested", "<think>", "one <think> two ", "three", {}),
            ("itself", "", "four <think> five", "six <think> x", {}),
            ("lines", "<think>", "um", '{"a": "y"}', {}),
            ("lines", "<think>", "um", '{"a": "y"}', {"structured_outputs": {"json": OBJECT}}),
            ("question", "<think>", "Quest", None, {"stop": ["ion:"]}),
        ):
            assert parts(chat(server, f"[[{NUMBER[text]}]]{start}", **more)) == (thought, content)
        answer = chat(server, f"[[{NUMBER['object']}]]<think>", structured_outputs={"json": OBJECT})
        assert parts(answer)[1] is None, '"k>{" may not come: the model says its next likely token, the end'

    @pytest.mark.parametrize("begun", ["<think>x</think>", "<think>x</think>So "])
    def test_a_form_behind_one_that_the_client_closed(self, server: Background, begun: str) -> None:
        said = {"role": "assistant", "content": begun}
        more = {"continue_final_message": True, "add_generation_prompt": False}
        choice = chat(server, "?", said, structured_outputs={"choice": ["yes", "no"]}, **more)
        assert parts(choice) in [(None, "yes"), (None, "no")]


class TestLogprobs:
    @pytest.mark.parametrize("text", ["smile", "half", "words"])
    def test_bytes_are_the_tokens_own(self, server: Background, text: str) -> None:
        true = [piece if isinstance(piece, bytes) else piece.encode() for piece in TEXTS[text]]
        rows = chat(server, f"[[{NUMBER[text]}]]", logprobs=True)["logprobs"]["content"]
        assert [bytes(row["bytes"]) for row in rows] == [*true, END.encode()]

    @pytest.mark.parametrize(
        ("text", "offsets", "tokens"),
        [
            ("smile", [0, 2, 2, 2, 2, 3, 7], ["ok", *(rf"bytes:\x{byte:02x}" for byte in SMILE), " end", END]),
            ("half", [0, 5, 5], ["Half ", r"bytes:\xe6\x9c", END]),
        ],
    )
    def test_offsets_index_the_text(self, server: Background, text: str, offsets: list[int], tokens: list[str]) -> None:
        prompt = f"[[{NUMBER[text]}]]"
        for echo in (False, True):
            whole = complete(server, prompt, logprobs=1, echo=echo)["logprobs"]
            begin = [0] if echo else []
            assert whole["text_offset"] == [*begin, *(at + echo * len(prompt) for at in offsets)]
            assert whole["tokens"] == [*[prompt][: len(begin)], *tokens]
            chunks = post(server, "/v1/completions", prompt=prompt, logprobs=1, echo=echo, stream=True)[1]
            shown = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
            assert {name: list(itertools.chain(*(row[name] for row in shown))) for name in whole} == whole

    def test_a_prompt_with_half_a_character(self, server: Background) -> None:
        """As ids, whose text has what stands for bytes that are none."""
        ids = server.engine.tokenizer.encode("éab")
        rows = ((ids, "éab", [0, 0, 1, 2]), (ids[1:], "\ufffdab", [0, 1, 2]), (ids[:1], "\ufffd", [0]))
        for prompt, text, offsets in rows:
            got = complete(server, prompt, logprobs=1, echo=True, max_tokens=0)
            assert (got["text"], got["logprobs"]["text_offset"]) == (text, offsets)

    def test_as_many_entries_as_asked_for(self, server: Background) -> None:
        """Among equally likely tokens most are bytes, and several have the same text."""
        likely = complete(server, f"[[{NUMBER['smile']}]]", logprobs=20, max_tokens=4)["logprobs"]["top_logprobs"]
        assert [len(row) for row in likely] == [20] * 4

    def test_spaces_of_pieces(self, pieces: Background) -> None:
        """The first token of a text loses its space there, and no other does."""
        got = complete(pieces, "[[1]]", logprobs=1)
        assert (got["text"], got["logprobs"]["tokens"]) == ("Hello big world", [" Hello", " big", " world", END])
        assert got["logprobs"]["text_offset"] == [0, 5, 9, 15]
        got = complete(pieces, "[[0]]", logprobs=1)
        assert (got["text"], got["logprobs"]["text_offset"]) == ("\U0001f600 smile", [0, 0, 0, 0, 1, 7])
        rows = chat(pieces, "[[0]]", logprobs=True)["logprobs"]["content"]
        assert [bytes(row["bytes"]) for row in rows][:2] == [b"\xf0", b"\x9f"]


class TestLimits:
    @pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"truncate_prompt_tokens": LIMIT, "logprobs": 1}])
    def test_a_prompt_alone_may_fill_the_context(self, server: Background, fields: dict[str, Any]) -> None:
        length = LIMIT + ("truncate_prompt_tokens" in fields)
        scored = complete(server, [5] * length, echo=True, max_tokens=0, **fields)
        assert scored["logprobs"] is None or len(scored["logprobs"]["tokens"]) == LIMIT
        for more in ({"echo": True, "max_tokens": 1}, {"max_tokens": 1}, {"echo": True}):
            status, says = post(server, "/v1/completions", prompt=[5] * length, **fields, **more)
            assert (status, f"{LIMIT} tokens" in says) == (400, True), "an answer has no room"
        status, says = post(server, "/v1/completions", prompt=[5] * (LIMIT + 1), echo=True, max_tokens=0)
        assert (status, f"{LIMIT + 1} tokens" in says) == (400, True)
