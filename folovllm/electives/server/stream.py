"""The server's side of requests: each gets the tokens that were sampled, and makes text of them when its reader asks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import NamedTuple

from folovllm.cache.cached_prefix import CachedPrefix
from folovllm.electives.server.messages import Add, Delta, Row
from folovllm.engine.logprobs import with_text
from folovllm.engine.output_processor import Answer, RequestState
from folovllm.engine.stop import check_stop_conditions
from folovllm.outputs import RequestOutput, TokenLogprob
from folovllm.request import Request, Sequence, SequenceStatus


class OutputDelta(NamedTuple):
    """What is new in an answer, for servers. Programs get a `CompletionOutput`."""

    answer: int  # among the `n`
    text: str
    logprobs: list[dict[int, TokenLogprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    offsets: SequenceOf[int] = ()  # where the tokens begin in the answer's text, if their log-probabilities are given


def add_message(number: int, request: Request) -> Add:
    """What the engine is told of a new request. It makes text only to look for stop strings."""
    params = replace(request.params, detokenize=bool(request.params.stop))
    return Add(number, replace(request, request_id=str(number), params=params, prompt=None))


class OutputCollector:
    """Tells one reader which of its streams have new outputs. The reader wakes once, however many they are."""

    def __init__(self) -> None:
        self._fresh: list[Stream] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, stream: Stream) -> None:
        """Add a stream that has new outputs to `self._fresh`, and wake the reader if it waits: once, however many streams come."""
        self._fresh.append(stream)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[Stream]:
        """The streams that have new outputs, each handed out once; waits until there is one.

        The reader waits on `self._waiter`, a future of the running event loop: `put` gives it a result.
        """
        if not self._fresh:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        fresh, self._fresh = self._fresh, []
        return fresh


class Stream(RequestState):
    """The outputs of one request, for one reader: the server's side of it.

    The sequences here mirror the engine's: they get the same tokens, so the same text, cut at the same stop string. There
    is no queue of outputs. A reader gets all that is new since it last looked, so one that reads slowly gets fewer and
    longer pieces, and holds no more memory than the answer takes.

    A reader of one stream iterates over its `RequestOutput`s. A reader of several, which share a collector, takes their pieces.
    """

    def __init__(
        self,
        number: int,
        request_id: str,
        seqs: list[Sequence],
        arrival: float,
        collector: OutputCollector,
        on_close: Callable[[Stream], None],
    ) -> None:
        super().__init__(request_id, seqs, seqs[0].params.output_kind, arrival)
        self.number, self.params = number, seqs[0].params
        self.newest: list[float | None] = [None] * len(seqs)  # when each answer got its newest tokens
        for seq in seqs:
            seq.detokenizer.offsets = None if self.params.logprobs is None else []
        self._collector, self._has_mail = collector, False
        self._on_close = on_close
        self.is_finished = False  # all is sampled, whether somebody took it or not
        self.is_over = False  # there is nothing more to take
        self._error: Exception | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a token has come."""
        return self.metrics.first_token_time is not None

    def feed(self, delta: Delta, now: float) -> None:
        """Take in what a step sampled for the answer `self.seqs[delta.index]`.

        With the first tokens of all (`has_begun`) `self.metrics` gets its `first_token_time`, and `prefix` of the first
        sequence becomes `CachedPrefix(num_hit_tokens=delta.num_cached_tokens)`. Rows of log-probabilities (`_with_text`) join
        `seq.logprobs`, and those of the prompt (`delta.prompt_logprobs`) `prompt_logprobs` of the first sequence. Each token
        goes to the sequence (`append_token`) and to its `detokenizer` (`append`) and is counted in `num_generated_tokens`.
        `check_stop_conditions(seq)` cuts the text at a stop string: ask it after each token where the request has stop strings
        or the delta several tokens, and drop what was sampled after the end.

        `newest` notes when. A `finish_reason` ends the answer (`_end`). The reader hears of it (`_tell`) if all is sampled, or if it
        wants outputs before that (`self.streams`). No text is made before it looks.
        """
        seq = self.seqs[delta.index]
        if not self.has_begun:
            self.seqs[0].prefix = CachedPrefix(num_hit_tokens=delta.num_cached_tokens)
            if delta.token_ids:
                self.metrics.first_token_time = now
        for row in delta.prompt_logprobs or ():
            self.seqs[0].prompt_logprobs.append(self._with_text(row))
        for row in delta.logprobs or ():
            seq.logprobs.append(self._with_text(row))
        must_look = bool(self.params.stop) or len(delta.token_ids) > 1
        for token_id in delta.token_ids:
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            self.metrics.num_generated_tokens += 1
            if must_look and check_stop_conditions(seq) is not None:  # it cuts the text, and notes what stopped it
                break
        self.newest[delta.index] = now
        if delta.finish_reason is not None:
            self._end(seq, delta.finish_reason, now)
        if self.is_finished or self.streams:
            self._tell()

    def _end(self, seq: Sequence, reason: str, now: float) -> None:
        if reason == "stop" and not self.params.stop:
            check_stop_conditions(seq)  # notes which token stopped it
        seq.finish(SequenceStatus(reason))
        self.is_finished = self.finished
        if self.is_finished:
            self.metrics.finish_time = now

    def _with_text(self, row: Row) -> dict[int, TokenLogprob]:
        return with_text(row, self.seqs[0].detokenizer.spelling)

    def abort(self, now: float) -> None:
        """End it here; its reader gets what there is, with finish_reason "abort"."""
        for seq in self.seqs:
            seq.finish(SequenceStatus.FINISHED_ABORTED)
        self.note_progress(now)
        self.is_finished = True
        self._tell()

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self._error = error
        self._tell()

    def _tell(self) -> None:
        if not self._has_mail:
            self._has_mail = True
            self._collector.put(self)

    def close(self) -> None:
        """The reader leaves. If the answer is not over, the engine stops working on it."""
        self.is_over = True
        self._on_close(self)

    def take(self) -> list[OutputDelta]:
        """What is new since the last look, an answer at a time. Raises what ended the stream, if that was an error."""
        self.look()
        return [_delta(answer) for answer in self.answers if answer.has_news]

    def look(self) -> None:
        """Make text of all that came since the last look. Raises as `take`."""
        self._has_mail = False
        self.is_over = self._error is not None or self.is_finished
        if self._error is not None:
            raise self._error
        for answer in self.answers:
            new, ended = answer.seq.output_token_ids[answer.num_tokens :].tolist(), answer.seq.status.is_finished
            if new or ended != answer.has_ended:
                answer.update(new, ended)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.is_over:
            raise StopAsyncIteration
        await self._collector.get()
        self.look()
        return self.output()


def _delta(answer: Answer) -> OutputDelta:
    seq, (old_chars, new_token_ids) = answer.seq, answer.mark_reported()
    first, end = answer.num_tokens - len(new_token_ids), answer.num_tokens
    return OutputDelta(
        seq.index,
        seq.detokenizer.read(old_chars, answer.num_chars),
        None if seq.params.logprobs is None else seq.logprobs[first:end],
        seq.status.value if answer.has_ended else None,
        seq.stop_reason,
        (seq.detokenizer.offsets or ())[first:end],
    )
