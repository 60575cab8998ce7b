"""From outputs of the engine to the JSON of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from folovllm.engine.output_processor import Piece, RequestState
from folovllm.outputs import TokenLogprob
from folovllm.server.reader import AnswerReader
from folovllm.server.replies import (
    Answer,
    ChatChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
    Usage,
)

Row = dict[int, TokenLogprob]
DONE = b"data: [DONE]\n\n"
NO_NEWS = ChatMessage()
MARK = "\0"  # in place of the text while a frame is made


def event(payload: bytes) -> bytes:
    """JSON as a server-sent event."""
    return b"data: " + payload + b"\n\n"


class CompletionWriter:
    """Writes one response of `/v1/completions`, whole or in chunks. `index` counts the answers of all its prompts."""

    PREFIX: ClassVar[str] = "cmpl"
    OBJECT: ClassVar[str] = "text_completion"
    CHUNK: ClassVar[str] = "text_completion"

    def __init__(self, model: str, n: int = 1, shows_prompt: bool = False) -> None:
        """`n` answers to each prompt; `shows_prompt`: with the log-probabilities of the prompt's tokens."""
        self._model, self._n, self._shows_prompt = model, n, shows_prompt
        self.requests: Sequence[RequestState] = ()  # one for each prompt, from when the engine has them
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._starts: defaultdict[int, int] = defaultdict(int)  # by answer: characters that are shown before it
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by answer: its events' bytes before and after the text
        self._has_frames = True  # False where an answer's events differ by more than their text

    def usage(self) -> Usage:
        """Tokens of the requests that the response is made of."""
        return usage_of(self.requests)

    def whole(self, answers: Iterable[tuple[int, Piece]], usage: Usage) -> bytes:
        """The response."""
        choices = [self.choice(index, answer) for index, answer in answers]
        return self._encoded(choices, usage)

    def _encoded(self, choices: list[object], usage: Usage) -> bytes:
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
        """Whether this event differs from the one before by its text alone."""
        return index in self._frames and answer.logprobs is None and answer.finish_reason is None

    def _spliced(self, index: int, text: str) -> bytes:
        before, after = self._frames[index]
        return before + msgspec.json.encode(text) + after

    def _events(self, index: int, answer: Piece, usage: Usage | None) -> bytes:
        """The events of an answer's news. The first time it keeps their frame, into which later texts are put."""
        events = b"".join([self._event([piece], usage) for piece in self.pieces(index, answer)])
        if self._has_frames and index not in self._frames and answer.finish_reason is None:
            (frame,) = self.pieces(index, Piece(index, MARK, None, None, None))
            before, _, after = self._event([frame], None).rpartition(msgspec.json.encode(MARK))
            self._frames[index] = before, after
        return events

    def last(self, usage: Usage) -> bytes:
        """The last event: it has the usage, and no text."""
        return self._event([], usage)

    def _event(self, choices: list[object], usage: Usage | None) -> bytes:
        return event(msgspec.json.encode(Answer(self.id, self.CHUNK, self._created, self._model, choices, usage)))

    def choice(self, index: int, answer: Piece) -> Any:
        """A whole answer."""
        logprobs = None
        if answer.logprobs is not None:
            logprobs = completion_logprobs(answer.logprobs, [self._starts[index] + at for at in answer.offsets])
        choice = CompletionChoice(index, answer.text, logprobs, answer.finish_reason, answer.stop_reason)
        if self._shows_prompt:
            choice.prompt_logprobs = shown_prompt(self.requests[index // self._n])
        return choice

    def pieces(self, index: int, answer: Piece) -> list[object]:
        """What is new in an answer."""
        return [self.choice(index, answer)]


class ChatWriter(CompletionWriter):
    """Writes one response of `/v1/chat/completions`."""

    PREFIX = "chatcmpl"
    OBJECT = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        num_top: int = 0,
        shows_prompt: bool = False,
        make_reader: Callable[[], AnswerReader] | None = None,
    ) -> None:
        """`make_reader`: for answers whose text may hold thoughts or tool calls."""
        super().__init__(model, shows_prompt=shows_prompt)
        self._num_top = num_top  # most likely tokens to show of each
        self._begun: set[int] = set()  # answers whose role was said
        self._readers = None if make_reader is None else defaultdict[int, AnswerReader](make_reader)
        self._has_frames = make_reader is None

    def _encoded(self, choices: list[object], usage: Usage) -> bytes:
        prompt = shown_prompt(self.requests[0]) if self._shows_prompt else None
        return msgspec.json.encode(Answer(self.id, self.OBJECT, self._created, self._model, choices, usage, prompt))

    def choice(self, index: int, answer: Piece) -> Any:
        """As inherited."""
        message, reason = ChatMessage("assistant", answer.text), answer.finish_reason
        if self._readers is not None:
            message, reason = self._readers[index].whole(answer)
        return ChatChoice(index, message, self._chat_logprobs(answer), reason, answer.stop_reason)

    def pieces(self, index: int, answer: Piece) -> list[object]:
        """As inherited; the first one says the role."""
        opening: list[object] = []
        if index not in self._begun:
            self._begun.add(index)
            opening = [ChatDelta(index, ChatMessage("assistant", ""))]
        message, reason = ChatMessage(content=answer.text), answer.finish_reason
        if self._readers is not None:
            message, reason = self._readers[index].news(answer)
            if message == NO_NEWS and not (reason or answer.logprobs):
                return opening
        return [*opening, ChatDelta(index, message, self._chat_logprobs(answer), reason, answer.stop_reason)]

    def _chat_logprobs(self, answer: Piece) -> ChatLogprobs | None:
        if answer.logprobs is None:
            return None
        return ChatLogprobs([chat_logprob(row, self._num_top) for row in answer.logprobs])


def completion_logprobs(rows: Iterable[Row], offsets: list[int]) -> CompletionLogprobs:
    """The rows of some tokens, which begin at `offsets` in the text. Each row's likely tokens have names of their own."""
    shown = CompletionLogprobs(offsets, [], [], [])
    for row in rows:
        likely: dict[str, float] = {}
        for token in row.values():
            name = completion_token(token)
            likely[name if name not in likely else f"token_id:{token.token_id}"] = token.logprob
        name, logprob = next(iter(likely.items()))
        shown.token_logprobs.append(logprob)
        shown.tokens.append(name)
        shown.top_logprobs.append(likely)
    return shown


def completion_token(token: TokenLogprob) -> str:
    """A token's text; of one that is a part of a character its bytes, as OpenAI's API writes them."""
    text, said = token.decoded_token or "", token.token_bytes or b""
    return text if text.encode() == said else "bytes:" + "".join(f"\\x{byte:02x}" for byte in said)


def chat_logprob(row: Row, num_top: int) -> ChatLogprob:
    """The chosen token of a row, and the `num_top` most likely ones."""
    likely = sorted(row.values(), key=lambda token: token.rank)[:num_top]
    chosen = top_logprob(next(iter(row.values())))
    return ChatLogprob(chosen.token, chosen.logprob, chosen.bytes, [top_logprob(token) for token in likely])


def top_logprob(token: TokenLogprob) -> TopLogprob:
    """A token, its log-probability, and its bytes: those of an answer's tokens make up its text."""
    return TopLogprob(token.decoded_token or "", token.logprob, list(token.token_bytes or b""))


def shown_prompt(request: RequestState) -> PromptLogprobs:
    """The log-probabilities of a prompt's tokens; an empty list if its request was aborted."""
    return [
        None if row is None else {str(id_): PromptLogprob(t.logprob, t.rank, t.decoded_token) for id_, t in row.items()}
        for row in request.prompt_logprobs or ()
    ]


def usage_of(requests: Iterable[RequestState]) -> Usage:
    """Tokens, so far, of the requests that one response is made of."""
    seen = list(requests)
    prompt = sum(request.metrics.num_prompt_tokens for request in seen)
    generated = sum(request.metrics.num_generated_tokens for request in seen)
    cached = sum(request.seqs[0].num_cached_tokens for request in seen)
    return Usage(prompt, generated, prompt + generated, {"cached_tokens": cached})
