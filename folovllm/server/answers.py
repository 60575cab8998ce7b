"""From outputs of the engine to the JSON of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterable
from typing import ClassVar

import msgspec

from folovllm.engine.output_processor import Piece, RequestState
from folovllm.outputs import TokenLogprob
from folovllm.server.protocol import (
    Answer,
    ChatChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    TopLogprob,
    Usage,
)

Row = dict[int, TokenLogprob]
DONE = b"data: [DONE]\n\n"
MARK = "\0"  # stands where the text comes


def event(payload: bytes) -> bytes:
    """JSON as a server-sent event."""
    return b"data: " + payload + b"\n\n"


class CompletionWriter:
    """Writes one response of `/v1/completions`, whole or in chunks. `index` counts the answers of all its prompts."""

    PREFIX: ClassVar[str] = "cmpl"
    OBJECT: ClassVar[str] = "text_completion"
    CHUNK: ClassVar[str] = "text_completion"

    def __init__(self, model: str) -> None:
        self._model = model
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets: defaultdict[int, int] = defaultdict(int)  # characters that an answer's tokens had so far
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # an answer's events before and after their text

    def whole(self, answers: Iterable[tuple[int, Piece]], usage: Usage) -> bytes:
        """The response."""
        choices = [self.choice(index, answer) for index, answer in answers]
        return msgspec.json.encode(Answer(self.id, self.OBJECT, self._created, self._model, choices, usage))

    def chunks(self, answers: Iterable[tuple[int, Piece]], usage: Usage | None) -> bytes:
        """Events that say what is new: none for a character that is not whole yet."""
        return b"".join([
            self._spliced(index, answer.text) if usage is None and self._is_text_alone(index, answer)
            else self._events(index, answer, usage)
            for index, answer in answers
            if answer.text or answer.logprobs or answer.finish_reason
        ])  # fmt: skip

    def _is_text_alone(self, index: int, answer: Piece) -> bool:
        """Whether the event is that of the text before it, but for the text."""
        return index in self._frames and answer.logprobs is None and answer.finish_reason is None

    def _spliced(self, index: int, text: str) -> bytes:
        before, after = self._frames[index]
        return before + msgspec.json.encode(text) + after

    def _events(self, index: int, answer: Piece, usage: Usage | None) -> bytes:
        """All that an answer's news has to say; from now on its text can be put into a frame that is there already."""
        events = b"".join([self._event([piece], usage) for piece in self.pieces(index, answer)])
        if index not in self._frames and answer.finish_reason is None:
            (frame,) = self.pieces(index, Piece(index, MARK, None, None, None))
            before, _, after = self._event([frame], None).rpartition(msgspec.json.encode(MARK))
            self._frames[index] = before, after
        return events

    def last(self, usage: Usage) -> bytes:
        """The event after the text."""
        return self._event([], usage)

    def _event(self, choices: list[object], usage: Usage | None) -> bytes:
        return event(msgspec.json.encode(Answer(self.id, self.CHUNK, self._created, self._model, choices, usage)))

    def choice(self, index: int, answer: Piece) -> object:
        """A whole answer."""
        logprobs = None if answer.logprobs is None else self._logprobs(index, answer.logprobs)
        return CompletionChoice(index, answer.text, logprobs, answer.finish_reason, answer.stop_reason)

    def pieces(self, index: int, answer: Piece) -> list[object]:
        """What is new in an answer."""
        return [self.choice(index, answer)]

    def _logprobs(self, index: int, rows: list[Row]) -> CompletionLogprobs:
        shown = CompletionLogprobs([], [], [], [])
        for row in rows:
            token = next(iter(row.values()))
            shown.text_offset.append(self._offsets[index])
            shown.token_logprobs.append(token.logprob)
            shown.tokens.append(token.decoded_token or "")
            likely: dict[str, float] = {}
            for other in row.values():  # two may have the same text: the chosen and the likelier come first
                likely.setdefault(other.decoded_token or "", other.logprob)
            shown.top_logprobs.append(likely)
            self._offsets[index] += len(token.decoded_token or "")
        return shown


class ChatWriter(CompletionWriter):
    """Writes one response of `/v1/chat/completions`."""

    PREFIX = "chatcmpl"
    OBJECT = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, model: str, num_top: int = 0) -> None:
        super().__init__(model)
        self._num_top = num_top  # most likely tokens to show of each
        self._begun: set[int] = set()  # answers whose role was said

    def choice(self, index: int, answer: Piece) -> object:
        """As inherited."""
        message = ChatMessage("assistant", answer.text)
        return ChatChoice(index, message, self._chat_logprobs(answer), answer.finish_reason, answer.stop_reason)

    def pieces(self, index: int, answer: Piece) -> list[object]:
        """As inherited; the first one says whose turn it is."""
        opening: list[object] = []
        if index not in self._begun:
            self._begun.add(index)
            opening = [ChatDelta(index, ChatMessage("assistant", ""))]
        message = ChatMessage(content=answer.text)
        return [
            *opening, ChatDelta(index, message, self._chat_logprobs(answer), answer.finish_reason, answer.stop_reason)
        ]  # fmt: skip

    def _chat_logprobs(self, answer: Piece) -> ChatLogprobs | None:
        if answer.logprobs is None:
            return None
        return ChatLogprobs([chat_logprob(row, self._num_top) for row in answer.logprobs])


def chat_logprob(row: Row, num_top: int) -> ChatLogprob:
    """The chosen token of a row, and the `num_top` most likely ones."""
    likely = sorted(row.values(), key=lambda token: token.rank)[:num_top]
    chosen = top_logprob(next(iter(row.values())))
    return ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, [top_logprob(token) for token in likely])


def top_logprob(token: TokenLogprob) -> TopLogprob:
    """A token with its bytes, as far as its text has them."""
    text = token.decoded_token or ""
    return TopLogprob(text, token.logprob, list(text.encode()))


def usage_of(requests: Iterable[RequestState]) -> Usage:
    """Tokens, so far, of the requests that one response is made of."""
    seen = list(requests)
    prompt = sum(request.metrics.num_prompt_tokens for request in seen)
    generated = sum(request.metrics.num_generated_tokens for request in seen)
    cached = sum(request.seqs[0].num_cached_tokens for request in seen)
    return Usage(prompt, generated, prompt + generated, {"cached_tokens": cached})
