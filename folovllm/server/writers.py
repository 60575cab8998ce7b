"""Renders what is new in answers as the JSON of OpenAI's API: as whole responses, or as server-sent events."""

from __future__ import annotations

import time
import uuid
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from folovllm.engine.output_processor import OutputDelta, RequestState, with_text
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
NOTHING_NEW = ChatMessage()
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
        self._begun: set[int] = set()  # answers of which something was written
        self._starts: defaultdict[int, int] = defaultdict(int)  # by answer: characters that are shown before it
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by answer: its events' bytes before and after the text
        self._has_frames = True  # False where an answer's events differ by more than their text

    def whole(self, answers: Iterable[tuple[int, OutputDelta]]) -> bytes:
        """The response."""
        choices = [choice for index, answer in answers for choice in self.choices(index, answer, is_whole=True)]
        return msgspec.json.encode(self._answer(self.OBJECT, choices, self.usage()))

    def chunks(self, answers: Iterable[tuple[int, OutputDelta]], usage: Usage | None) -> bytes:
        """Events that say what is new: none for a character that is not whole yet."""
        return b"".join([
            self._spliced(index, answer.text) if usage is None and self._is_text_alone(index, answer)
            else self._events(index, answer, usage)
            for index, answer in answers
            if answer.text or answer.logprobs or answer.finish_reason
        ])  # fmt: skip

    def _is_text_alone(self, index: int, answer: OutputDelta) -> bool:
        """Whether this event differs from the one before by its text alone."""
        return index in self._frames and answer.logprobs is None and answer.finish_reason is None

    def _spliced(self, index: int, text: str) -> bytes:
        before, after = self._frames[index]
        return before + msgspec.json.encode(text) + after

    def _events(self, index: int, answer: OutputDelta, usage: Usage | None) -> bytes:
        """The events of what is new. The first time it keeps their frame, into which later texts are put."""
        events = b"".join([self._event([choice], usage) for choice in self.choices(index, answer)])
        if self._has_frames and index not in self._frames and answer.finish_reason is None:
            frame = self._event(self.choices(index, OutputDelta(index, MARK, None, None, None)), None)
            before, _, after = frame.rpartition(msgspec.json.encode(MARK))
            self._frames[index] = before, after
        return events

    def last(self) -> bytes:
        """The last event: it has the usage, and no text."""
        return self._event([], self.usage())

    def _event(self, choices: list[Any], usage: Usage | None) -> bytes:
        return event(msgspec.json.encode(self._answer(self.CHUNK, choices, usage)))

    def _answer(self, kind: str, choices: list[Any], usage: Usage | None) -> Answer[Any]:
        return Answer(self.id, kind, self._created, self._model, choices, usage)

    def usage(self) -> Usage:
        """Tokens, so far, of the requests that the response is made of."""
        prompt = sum(request.metrics.num_prompt_tokens for request in self.requests)
        generated = sum(request.metrics.num_generated_tokens for request in self.requests)
        cached = sum(request.seqs[0].num_cached_tokens for request in self.requests)
        return Usage(prompt, generated, prompt + generated, {"cached_tokens": cached})

    def choices(self, index: int, answer: OutputDelta, is_whole: bool = False) -> list[Any]:
        """What is new in an answer, or with `is_whole` all of it."""
        logprobs = None
        if answer.logprobs is not None:
            logprobs = completion_logprobs(answer.logprobs, [self._starts[index] + at for at in answer.offsets])
        choice = CompletionChoice(index, answer.text, logprobs, answer.finish_reason, answer.stop_reason)
        if self._shows_prompt:
            choice.prompt_logprobs = shown_prompt(self.requests[index // self._n])
        return [choice]


class EchoWriter(CompletionWriter):
    """A `CompletionWriter` whose answers begin with their prompts (`echo`): as text, and with log-probabilities where asked for."""

    def __init__(
        self,
        model: str,
        n: int,
        decode: Callable[[list[int]], str],
        num_logprobs: int | None,
        prompt_alone: bool,
        shows_prompt: bool = False,
    ) -> None:
        """`decode` is for prompts that came as ids; `prompt_alone` leaves the answers out."""
        super().__init__(model, n, shows_prompt)
        self._decode, self._num_logprobs, self._prompt_alone = decode, num_logprobs, prompt_alone
        self._has_frames = not prompt_alone

    def usage(self) -> Usage:
        """Tokens of the requests; an answer that nobody sees counts nothing."""
        usage = super().usage()
        if self._prompt_alone:
            usage = msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        return usage

    def choices(self, index: int, answer: OutputDelta, is_whole: bool = False) -> list[CompletionChoice]:
        """What is new in an answer; the first time, behind its prompt."""
        text, logprobs = ("", None) if index in self._begun else self._prompt(index)
        self._begun.add(index)
        choice: CompletionChoice = super().choices(index, answer)[0]
        if self._prompt_alone:
            choice.text, choice.logprobs = "", None
            choice.finish_reason, choice.stop_reason = answer.finish_reason and "length", None
        choice.text = text + choice.text
        if logprobs is not None:
            logprobs.extend(choice.logprobs or CompletionLogprobs([], [], [], []))
            choice.logprobs = logprobs
        return [choice]

    def _prompt(self, index: int) -> tuple[str, CompletionLogprobs | None]:
        """The text before an answer, and its log-probabilities: of the token and of `num_logprobs` more."""
        request, logprobs = self.requests[index // self._n], None
        text = self._decode(request.prompt_token_ids) if request.prompt is None else request.prompt
        scored = request.prompt_logprobs
        if self._num_logprobs is not None and scored is not None:  # an answer that was aborted has none
            first = with_text([(request.prompt_token_ids[0], 0.0, 1)], request.seqs[0].detokenizer.spelling)
            rows = [first, *(dict(list(row.items())[: 1 + self._num_logprobs]) for row in scored if row)]
            logprobs = completion_logprobs(rows, offsets_in(text, [next(iter(row.values())) for row in rows]))
            logprobs.token_logprobs[0] = logprobs.top_logprobs[0] = None  # it comes after nothing
        self._starts[index] = len(text)
        return text, logprobs


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
        make_reader: Callable[[], AnswerReader] = AnswerReader,
    ) -> None:
        """`num_top`: most likely tokens to show of each; `make_reader`: for answers whose text may hold thoughts or tool calls."""
        super().__init__(model, shows_prompt=shows_prompt)
        self._num_top = num_top
        self._readers: defaultdict[int, AnswerReader] = defaultdict(make_reader)
        self._has_frames = make_reader is AnswerReader

    def _answer(self, kind: str, choices: list[Any], usage: Usage | None) -> Answer[Any]:
        answer = super()._answer(kind, choices, usage)
        if self._shows_prompt:  # then it is a whole response
            answer.prompt_logprobs = shown_prompt(self.requests[0])
        return answer

    def choices(self, index: int, answer: OutputDelta, is_whole: bool = False) -> list[Any]:
        """What is new in an answer, the role first; or the whole message."""
        message, reason = self._readers[index].read(answer, is_whole)
        logprobs = None
        if answer.logprobs is not None:
            logprobs = ChatLogprobs([chat_logprob(row, self._num_top) for row in answer.logprobs])
        if is_whole:
            return [ChatChoice(index, message, logprobs, reason, answer.stop_reason)]
        opening = [] if index in self._begun else [ChatDelta(index, ChatMessage("assistant", ""))]
        self._begun.add(index)
        if message == NOTHING_NEW and not (reason or answer.logprobs):
            return opening
        return [*opening, ChatDelta(index, message, logprobs, reason, answer.stop_reason)]


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


def offsets_in(prompt: str, tokens: list[TokenLogprob]) -> list[int]:
    """Where tokens begin in a prompt that they are the end of: what a tokenizer puts before a text has no place in it."""
    decoder, ends = getincrementaldecoder("utf-8")("replace"), [0]
    for i, token in enumerate(tokens, 1):
        ends.append(ends[-1] + len(decoder.decode(token.token_bytes or b"", i == len(tokens))))
    return [max(0, len(prompt) - ends[-1] + at) for at in ends[:-1]]
