"""Reads an answer's text for what it holds beside content: thoughts and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace

from msgspec import UNSET

from folovllm.chat_template import with_plain_content
from folovllm.engine.output_processor import OutputDelta
from folovllm.sampling_params import SamplingParams
from folovllm.server import reasoning, tool_calls
from folovllm.server.protocol import ChatRequest
from folovllm.server.reasoning import ReasoningSplitter
from folovllm.server.replies import ChatMessage
from folovllm.server.requests import offered
from folovllm.server.tool_calls import ToolCall, ToolCallParser

TAGS = (reasoning.OPENING, reasoning.CLOSING, tool_calls.OPENING, tool_calls.CLOSING)


class AnswerReader:
    """One answer, whole or piece by piece: both are read the same way. Without `thoughts` and `calls` all text is content."""

    def __init__(self, thoughts: ReasoningSplitter | None = None, calls: ToolCallParser | None = None) -> None:
        self._thoughts, self._calls = thoughts, calls

    def read(self, answer: OutputDelta, is_whole: bool = False) -> tuple[ChatMessage, str | None]:
        """What a piece of the answer adds, or the whole message; and the finish reason."""
        message, reason = ChatMessage(content=answer.text), answer.finish_reason
        if self._thoughts is not None or self._calls is not None:
            thought, content, calls = self._split(answer.text, last=reason is not None)
            message = ChatMessage("", content or UNSET, thought or None, calls or None)
        if self._calls is not None and self._calls.num_calls and reason == "stop":
            reason = "tool_calls"
        if is_whole:
            message.role = "assistant"
            for call in message.tool_calls or ():
                call.index = None
            if message.content is UNSET:
                message.content = None if message.tool_calls or message.reasoning_content else ""
        return message, reason

    def _split(self, content: str, last: bool) -> tuple[str, str, list[ToolCall]]:
        """A piece of text as thought, content and tool calls."""
        thought, calls = "", list[ToolCall]()
        if self._thoughts is not None:
            thought, content = self._thoughts.feed(content, last)
        if self._calls is not None:
            content, calls = self._calls.feed(content, last)
        return thought, content, calls


def reading_of(
    asked: ChatRequest, params: SamplingParams, prompt: str, parser: str | None, tags_are_special: bool
) -> tuple[SamplingParams, Callable[[], AnswerReader]]:
    """How the text of the answers is read, and the sampling parameters that this needs.

    Tags must be text, even where the tokenizer takes them for special tokens; and the grammar of an answer begins behind
    its thought.

    Args:
        parser: which way the model thinks; None: thoughts stay in the content.
    """
    has_tools = bool(offered(asked.tools, asked.tool_choice))
    if parser is None and not has_tools:
        return params, AnswerReader
    if asked.skip_special_tokens is None and tags_are_special:
        params = replace(params, skip_special_tokens=False)
    splitter = None if parser is None else ReasoningSplitter(parser, prompt, begun(asked))
    if splitter is not None and params.structured_outputs is not None and not splitter.is_over:
        params = replace(params, structured_outputs=replace(params.structured_outputs, after=reasoning.CLOSING))

    def make_reader() -> AnswerReader:
        return AnswerReader(copy(splitter), ToolCallParser(asked.parallel_tool_calls is False) if has_tools else None)

    return params, make_reader


def begun(asked: ChatRequest) -> str:
    """What the client wrote of the answer that is asked for."""
    content = asked.messages[-1].get("content") if asked.continue_final_message and asked.messages else None
    return str(with_plain_content({"content": content})["content"] or "")
