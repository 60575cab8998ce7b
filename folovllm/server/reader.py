"""Reads an answer's text for what it holds beside content: thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

from folovllm.chat_template import with_plain_content
from folovllm.engine.output_processor import Piece
from folovllm.sampling_params import SamplingParams
from folovllm.server import reasoning, tool_calls
from folovllm.server.protocol import ChatRequest
from folovllm.server.reasoning import ReasoningSplitter
from folovllm.server.replies import ChatMessage
from folovllm.server.tool_calls import ToolCall, ToolCallParser
from folovllm.server.tools import offered

TAGS = (reasoning.OPENING, reasoning.CLOSING, tool_calls.OPENING, tool_calls.CLOSING)


class AnswerReader:
    """One answer, whole or piece by piece: both are read the same way."""

    def __init__(self, thoughts: ReasoningSplitter | None, calls: ToolCallParser | None) -> None:
        self._thoughts, self._calls = thoughts, calls

    def news(self, answer: Piece) -> tuple[ChatMessage, str | None]:
        """What a piece of the answer adds, and the finish reason."""
        thought, content, calls = "", answer.text, list[ToolCall]()
        last = answer.finish_reason is not None
        if self._thoughts is not None:
            thought, content = self._thoughts.feed(content, last)
        if self._calls is not None:
            content, calls = self._calls.feed(content, last)
        message = ChatMessage()
        if content:
            message.content = content
        message.reasoning_content, message.tool_calls = thought or None, calls or None
        return message, self._reason(answer)

    def whole(self, answer: Piece) -> tuple[ChatMessage, str | None]:
        """The whole answer as a message, and the finish reason."""
        message, reason = self.news(answer)
        message.role = "assistant"
        for call in message.tool_calls or ():
            call.index = None
        if not isinstance(message.content, str):
            message.content = None if message.tool_calls or message.reasoning_content else ""
        return message, reason

    def _reason(self, answer: Piece) -> str | None:
        called = self._calls is not None and self._calls.num_calls
        return "tool_calls" if called and answer.finish_reason == "stop" else answer.finish_reason


def reading_of(
    asked: ChatRequest, params: SamplingParams, prompt: str, parser: str | None, tags_are_special: bool
) -> tuple[SamplingParams, Callable[[], AnswerReader] | None]:
    """How the text of the answers is read, and the sampling parameters that this needs.

    Tags must be text, even where the tokenizer takes them for special tokens; and the form of an answer begins behind its
    thought. Without tools and thoughts text is content, and nobody reads it.

    Args:
        parser: which way the model thinks; None: thoughts stay in the content.
    """
    has_tools = bool(offered(asked.tools, asked.tool_choice))
    if parser is None and not has_tools:
        return params, None
    if asked.skip_special_tokens is None and tags_are_special:
        params = replace(params, skip_special_tokens=False)
    splitter = None if parser is None else ReasoningSplitter(parser, prompt, begun(asked))
    if splitter is not None and params.structured_outputs is not None and not splitter.is_over:
        params = replace(params, structured_outputs=replace(params.structured_outputs, after=reasoning.CLOSING))

    def make_reader() -> AnswerReader:
        return AnswerReader(
            copy(splitter),
            ToolCallParser(asked.parallel_tool_calls is False) if has_tools else None,
        )

    return params, make_reader


def begun(asked: ChatRequest) -> str:
    """What the client wrote of the answer that is asked for."""
    content = asked.messages[-1].get("content") if asked.continue_final_message and asked.messages else None
    return str(with_plain_content({"content": content})["content"] or "")
