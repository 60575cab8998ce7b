"""From sequences to `RequestOutput`: text as far as it is safe to show, tokens, times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from functools import partial
from operator import attrgetter, getitem
from typing import Any, NamedTuple

from folovllm.faults import Faults
from folovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput, TokenLogprob
from folovllm.request import Sequence, SequenceStatus
from folovllm.sampling_params import RequestOutputKind
from folovllm.spelling import Spelling
from folovllm.step.schedule import Logprobs, Scores

PromptLogprobs = list[dict[int, TokenLogprob] | None] | None
IS_FINISHED = attrgetter("status.is_finished")  # of a sequence; asked of each at each step


class OutputDelta(NamedTuple):
    """What is new in an answer, for servers. Programs get a `CompletionOutput`."""

    answer: int  # among the `n`
    text: str
    logprobs: list[dict[int, TokenLogprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    offsets: SequenceOf[int] = ()  # where the tokens begin in the answer's text, if their log-probabilities are given


class OutputProcessor:
    """The requests that are being served, by id, and what each of them has to report."""

    def __init__(self, faults: Faults | None = None) -> None:
        self._faults = faults or Faults()
        self.requests: dict[str, RequestState] = {}

    def keep_logprobs(self, seq: Sequence, scores: Scores | None, rows: list[Logprobs]) -> None:
        """Take in the log-probabilities of a step: first those of the prompt's tokens, then those of sampled tokens."""
        shown = [with_text(row, seq.detokenizer.spelling) for row in rows]
        num_scores = 0 if scores is None else len(scores.token_ids)
        seq.prompt_logprobs += shown[:num_scores]
        seq.logprobs += shown[num_scores:]
        del seq.logprobs[seq.num_output_tokens :]  # of tokens behind the one that ended the answer

    def outputs(self, updated: Iterable[Sequence], now: float) -> list[RequestOutput]:
        """One output for each request that has something to report. Finished requests leave."""
        outputs = []
        for request_id in dict.fromkeys(seq.request_id for seq in updated):
            state = self.requests[request_id]
            finished = state.finished
            if finished or state.streams or state.metrics.first_token_time is None:
                state.note_progress(now)
            if finished:
                del self.requests[request_id]
            if finished or state.streams:
                try:  # as `Faults.at`, which costs time
                    outputs.append(state.output())
                except BaseException as error:
                    self._faults.note(state.seqs[0], error)
        return outputs


class RequestState:
    """A request that is being served, and the part of it that was reported.

    Attributes:
        streams: whether there are outputs before the last.
    """

    def __init__(self, request_id: str, seqs: list[Sequence], kind: RequestOutputKind, arrival: float) -> None:
        self.request_id = request_id
        self.seqs = seqs
        self.metrics = RequestMetrics(arrival, num_prompt_tokens=seqs[0].num_prompt_tokens)
        self._kind = kind
        self.streams = kind is not RequestOutputKind.FINAL_ONLY
        self._answers = [Answer(seq) for seq in seqs]
        self.prompt = seqs[0].request.prompt
        self.prompt_token_ids = list(seqs[0].request.prompt_token_ids)  # users may do with it as they like
        self._prompt_was_scored = False  # and a report said so

    @property
    def finished(self) -> bool:
        """Whether all answers are over."""
        return all(map(IS_FINISHED, self.seqs))

    @property
    def prompt_logprobs(self) -> PromptLogprobs:
        """The log-probabilities of the prompt's tokens, None for the first. None if not asked for, or not complete yet."""
        seq = self.seqs[0]
        if seq.params.prompt_logprobs is None or seq.num_unscored_tokens:
            return None
        return [None, *seq.prompt_logprobs]

    def note_progress(self, now: float) -> None:
        """Take the times of a step that ended `now`."""
        self.metrics.num_generated_tokens = sum(seq.num_output_tokens for seq in self.seqs)
        if self.metrics.first_token_time is None and self.metrics.num_generated_tokens:
            self.metrics.first_token_time = now
        if self.finished:
            self.metrics.finish_time = now

    def output(self) -> RequestOutput:
        """The request as it is, with what is new since the last call as deltas."""
        finished, deltas_alone = self.finished, self._kind is RequestOutputKind.DELTA
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[
                answer.report(deltas_alone, copy_later=not finished)
                for answer in self._answers
                if not deltas_alone or answer.has_news
            ],
            finished=finished,
            metrics=self.metrics.snapshot(),
            num_cached_tokens=self.seqs[0].num_cached_tokens or 0,
            prompt_logprobs=self._report_prompt(once=deltas_alone),
        )

    def deltas(self) -> list[OutputDelta]:
        """What is new since the last call, of those answers that have news."""
        return [answer.delta() for answer in self._answers if answer.has_news]

    def _report_prompt(self, once: bool) -> PromptLogprobs:
        if once and self._prompt_was_scored:
            return None
        logprobs = self.prompt_logprobs
        self._prompt_was_scored = logprobs is not None
        return logprobs


class Answer:
    """One answer of a request, and how much of it was reported. A report costs what is new, however long the answer is."""

    def __init__(self, seq: Sequence) -> None:
        self._seq = seq
        self._num_chars = self._num_tokens = 0  # that were reported
        self._cumulative_logprob = 0.0  # of these tokens
        self._was_over = False

    @property
    def has_news(self) -> bool:
        """Whether there are tokens, or an end, that were not reported."""
        return self._seq.num_output_tokens > self._num_tokens or self._seq.status.is_finished != self._was_over

    def report(self, deltas_alone: bool, copy_later: bool) -> CompletionOutput:
        """The answer as it is, or with `deltas_alone` what is new in it.

        With `copy_later` a long field is copied only when it is read: the next report holds most of it again.
        """
        seq = self._seq
        old_chars, old_tokens = self._advance()
        copy: Callable[..., Any] = partial if copy_later else _now
        first_char, first_token = (old_chars, old_tokens) if deltas_alone else (0, 0)
        has_logprobs = seq.params.logprobs is not None
        return CompletionOutput(
            index=seq.index,
            text=copy(seq.detokenizer.read, first_char, self._num_chars),
            token_ids=copy(_token_ids, seq, first_token, self._num_tokens),
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=copy(getitem, seq.logprobs, slice(first_token, self._num_tokens)) if has_logprobs else None,
            finish_reason=seq.status.value if seq.status.is_finished else None,
            stop_reason=seq.stop_reason,
            delta_text=seq.detokenizer.read(old_chars, self._num_chars),
            delta_token_ids=_token_ids(seq, old_tokens, self._num_tokens),
        )

    def delta(self) -> OutputDelta:
        """What is new."""
        seq = self._seq
        old_chars, old_tokens = self._advance()
        return OutputDelta(
            seq.index,
            seq.detokenizer.read(old_chars, self._num_chars),
            None if seq.params.logprobs is None else seq.logprobs[old_tokens : self._num_tokens],
            seq.status.value if self._was_over else None,
            seq.stop_reason,
            (seq.detokenizer.offsets or ())[old_tokens : self._num_tokens],
        )

    def _advance(self) -> tuple[int, int]:
        """Move the marks to what there is now; returns where they were."""
        old_chars, old_tokens, seq = self._num_chars, self._num_tokens, self._seq
        if not self._was_over:
            self._num_tokens, self._num_chars = seq.num_output_tokens, num_visible_chars(seq)
            self._was_over = seq.status.is_finished
            if seq.logprobs:
                new = seq.logprobs[old_tokens : self._num_tokens]  # behind the end there may be more
                self._cumulative_logprob += sum(chosen(row).logprob for row in new)
        return old_chars, old_tokens


def num_visible_chars(seq: Sequence) -> int:
    """How many characters of the text are final: no later token can take them back.

    While an answer grows, its last characters may turn out to begin a stop string, so that many are held back.
    """
    detokenizer = seq.detokenizer
    if seq.status.is_finished:
        if ended_by_token(seq) and not seq.params.include_stop_str_in_output:
            detokenizer.forget_last()
        detokenizer.flush()
        return detokenizer.num_chars
    detokenizer.advance()
    held_back = max(map(len, seq.params.stop)) - 1 if seq.params.stop else 0
    return max(0, detokenizer.num_chars - held_back)


def ended_by_token(seq: Sequence) -> bool:
    """Whether the last token is one that ends answers: an end-of-text id (no `stop_reason`), or one of the request's own."""
    return seq.status is SequenceStatus.FINISHED_STOPPED and not isinstance(seq.stop_reason, str)


def chosen(row: dict[int, TokenLogprob]) -> TokenLogprob:
    """The entry of the token that was sampled: it comes first."""
    return next(iter(row.values()))


def with_text(row: Logprobs, spelling: Spelling | None) -> dict[int, TokenLogprob]:
    """A token's log-probability and those of likely others, by token id. Without `spelling` they have no text."""
    return {id_: TokenLogprob(id_, value, rank, *(spelling[id_] if spelling else (None,))) for id_, value, rank in row}


def _token_ids(seq: Sequence, start: int, end: int) -> list[int]:
    ids: list[int] = seq.output_token_ids[start:end].tolist()
    return ids


def _now(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
