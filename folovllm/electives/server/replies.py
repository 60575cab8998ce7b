"""The JSON of replies, after OpenAI's API: what each address answers, and how answers become it, whole or as server-sent events."""

from __future__ import annotations

import time
import uuid
from codecs import getincrementaldecoder
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from folovllm.electives.server.protocol import ChatRequest, CompletionRequest, Sampling
from folovllm.electives.server.reasoning import ReasoningSplitter
from folovllm.electives.server.stream import OutputDelta
from folovllm.electives.server.tool_calls import ToolCall, ToolCallParser
from folovllm.engine.logprobs import prompt_logprobs_of, with_text
from folovllm.engine.output_processor import RequestState
from folovllm.outputs import TokenLogprob

Row = dict[int, TokenLogprob]
DONE = b"data: [DONE]\n\n"
MARK = "\0"  # in place of the text while a frame is made


class Usage(msgspec.Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class CompletionLogprobs(msgspec.Struct):
    """Of each token of a completion."""

    text_offset: list[int]
    token_logprobs: list[float | None]  # None for the first token of a prompt, which comes after nothing
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def extend(self, other: CompletionLogprobs) -> None:
        """Add those of the tokens that follow."""
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


class PromptLogprob(msgspec.Struct):
    """A token that stands in a prompt, or could have, as vLLM's servers say it."""

    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; None for the first token


class CompletionChoice(msgspec.Struct):
    """An answer, or what is new in it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of an answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of each token of an answer."""

    content: list[ChatLogprob]


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """A message, or what is new in it."""

    role: str = ""
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct):
    """An answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatDelta(msgspec.Struct):
    """What is new in an answer."""

    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ResponseBody(msgspec.Struct, omit_defaults=True):
    """A response, or one chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None  # of a chat


def tokenizer_info(tokenizer: Any) -> dict[str, Any]:
    """What `/tokenizer_info` tells of a tokenizer: how texts become ids, and conversations texts, by the names of `tokenizer_config.json`. No path of this machine is among them."""
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = {str(id_): {flag: getattr(t, flag) for flag in flags} for id_, t in tokenizer.added_tokens_decoder.items()}
    named = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    template = getattr(tokenizer, "chat_template", None)
    return named | {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "chat_template": template if isinstance(template, str) else None,
        "extra_special_tokens": [token for token in tokenizer.all_special_tokens if token not in named.values()],
        "added_tokens_decoder": added,
    }


class MessageReader:
    """One answer, whole or piece by piece: both are read the same way. Without `thoughts` and `calls` all text is content."""

    def __init__(self, thoughts: ReasoningSplitter | None = None, calls: ToolCallParser | None = None) -> None:
        self._thoughts, self._calls = thoughts, calls

    def read(self, answer: OutputDelta, is_whole: bool = False) -> tuple[ChatMessage, str | None]:
        """What a piece of the answer adds, or the whole message; and the finish reason."""
        thought, content, calls, reason = "", answer.text, list[ToolCall](), answer.finish_reason
        if self._thoughts is not None:
            thought, content = self._thoughts.feed(content, reason is not None)
        if self._calls is not None:
            self._calls.is_whole = is_whole
            content, calls = self._calls.feed(content, reason is not None)
            if self._calls.num_calls and reason == "stop":
                reason = "tool_calls"
        message = ChatMessage("", content or msgspec.UNSET, thought or None, calls or None)
        if is_whole:
            message.role = "assistant"
            message.content = content or (None if calls or thought else "")
            for call in calls:
                call.index = None
        return message, reason


def event(payload: bytes) -> bytes:
    """JSON as a server-sent event."""
    return b"data: " + payload + b"\n\n"


class CompletionWriter:
    """Writes one response of `/v1/completions`, whole or in chunks. `index` counts the answers of all its prompts."""

    PREFIX: ClassVar[str] = "cmpl"
    OBJECT: ClassVar[str] = "text_completion"
    CHUNK: ClassVar[str] = "text_completion"

    def __init__(self, model: str, request: Sampling, n: int) -> None:
        """`model`: the name that the response shows; `n` answers to each prompt."""
        self._model, self._n, self._shows_prompt = model, n, request.prompt_logprobs is not None
        self.requests: Sequence[RequestState] = ()  # one for each prompt, from when the engine has them
        self.id = f"{self.PREFIX}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._begun: set[int] = set()  # answers of which something was written
        self._starts: defaultdict[int, int] = defaultdict(int)  # by answer: characters that are shown before it
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # by answer: its events' bytes before and after the text
        self._has_frames = True  # False where an answer's events differ by more than their text

    def full(self, answers: Iterable[tuple[int, OutputDelta]]) -> bytes:
        """The response."""
        choices = [choice for index, answer in answers for choice in self.choices(index, answer, is_whole=True)]
        return msgspec.json.encode(self._body(self.OBJECT, choices, self.usage()))

    def chunks(self, answers: Iterable[tuple[int, OutputDelta]], usage: Usage | None) -> bytes:
        """An event for each delta with text, log-probabilities or a finish reason: half a character alone gives none."""
        return b"".join([
            self._events(index, answer, usage)
            for index, answer in answers
            if answer.text or answer.logprobs or answer.finish_reason
        ])  # fmt: skip

    def _events(self, index: int, answer: OutputDelta, usage: Usage | None) -> bytes:
        """The events of what is new. The first time it keeps their frame, into which later texts are put."""
        is_text_alone = usage is None and answer.logprobs is None and answer.finish_reason is None
        if is_text_alone and (known := self._frames.get(index)) is not None:
            return known[0] + msgspec.json.encode(answer.text) + known[1]
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
        return event(msgspec.json.encode(self._body(self.CHUNK, choices, usage)))

    def _body(self, kind: str, choices: list[Any], usage: Usage | None) -> ResponseBody:
        return ResponseBody(self.id, kind, self._created, self._model, choices, usage)

    def usage(self) -> Usage:
        """Tokens, so far, of the requests that the response is made of."""
        prompt = sum(request.metrics.num_prompt_tokens for request in self.requests)
        generated = sum(request.metrics.num_generated_tokens for request in self.requests)
        cached = sum(request.seqs[0].num_cached_tokens for request in self.requests)
        return Usage(prompt, generated, prompt + generated, {"cached_tokens": cached})

    def choices(self, index: int, answer: OutputDelta, is_whole: bool = False) -> list[Any]:
        """Return the choices that show `answer`, a delta. With `is_whole` it is the full answer."""
        logprobs = None
        if answer.logprobs is not None:
            logprobs = completion_logprobs(answer.logprobs, [self._starts[index] + at for at in answer.offsets])
        choice = CompletionChoice(index, answer.text, logprobs, answer.finish_reason, answer.stop_reason)
        if self._shows_prompt:
            choice.prompt_logprobs = shown_prompt(self.requests[index // self._n])
        return [choice]


class EchoWriter(CompletionWriter):
    """A `CompletionWriter` whose answers begin with their prompts (`echo`): as text, and with log-probabilities where asked for."""

    def __init__(self, model: str, request: CompletionRequest, n: int, decode: Callable[[list[int]], str]) -> None:
        """`decode` is for prompts that came as ids."""
        super().__init__(model, request, n)
        self._decode, self._num_logprobs, self._prompt_alone = decode, request.logprobs, request.wants_prompt_alone
        self._has_frames = not self._prompt_alone

    def usage(self) -> Usage:
        """Tokens of the requests; an answer that nobody sees counts nothing."""
        usage = super().usage()
        if self._prompt_alone:
            usage = msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        return usage

    def choices(self, index: int, answer: OutputDelta, is_whole: bool = False) -> list[CompletionChoice]:
        """Return the choice that shows `answer`, a delta; the first time its text comes after the prompt."""
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
        scored = prompt_logprobs_of(request.seqs[0])
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

    def __init__(self, model: str, request: ChatRequest, n: int, make_reader: Callable[[], MessageReader]) -> None:
        super().__init__(model, request, n)
        self._num_top = request.top_logprobs or 0
        self._readers: defaultdict[int, MessageReader] = defaultdict(make_reader)
        self._has_frames = make_reader is MessageReader

    def _body(self, kind: str, choices: list[Any], usage: Usage | None) -> ResponseBody:
        answer = super()._body(kind, choices, usage)
        if self._shows_prompt:  # then it is a whole response
            answer.prompt_logprobs = shown_prompt(self.requests[0])
        return answer

    def choices(self, index: int, answer: OutputDelta, is_whole: bool = False) -> list[Any]:
        """Return the choices that show `answer`, a delta, after one with the role. With `is_whole` they show the full message."""
        message, reason = self._readers[index].read(answer, is_whole)
        logprobs = None
        if answer.logprobs is not None:
            logprobs = ChatLogprobs([chat_logprob(row, self._num_top) for row in answer.logprobs])
        if is_whole:
            return [ChatChoice(index, message, logprobs, reason, answer.stop_reason)]
        opening = [] if index in self._begun else [ChatDelta(index, ChatMessage("assistant", ""))]
        self._begun.add(index)
        if message == ChatMessage() and not (reason or answer.logprobs):
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
    text, spelled = token.decoded_token or "", token.token_bytes or b""
    return text if text.encode() == spelled else "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


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
        for row in prompt_logprobs_of(request.seqs[0]) or ()
    ]


def offsets_in(prompt: str, tokens: list[TokenLogprob]) -> list[int]:
    """Where tokens begin in a prompt that they are the end of: what a tokenizer puts before a text has no place in it."""
    decoder, ends = getincrementaldecoder("utf-8")("replace"), [0]
    for i, token in enumerate(tokens, 1):
        ends.append(ends[-1] + len(decoder.decode(token.token_bytes or b"", i == len(tokens))))
    return [max(0, len(prompt) - ends[-1] + at) for at in ends[:-1]]
