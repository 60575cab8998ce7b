"""From sequences to `RequestOutput`: text as far as it is safe to show, tokens, times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from folovllm.engine.logprobs import chosen, prompt_logprobs_of
from folovllm.engine.no_text import without_text
from folovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from folovllm.request import Sequence, SequenceOutput, SequenceStatus
from folovllm.sampling_params import RequestOutputKind

IS_FINISHED = attrgetter("status.is_finished")  # of a sequence; asked of each at each step


class OutputProcessor:
    """The requests that are being served, by id, and what each of them has to report."""

    def __init__(self, abort: Callable[..., None]) -> None:
        """`abort(*sequences)` has the scheduler end them: those of a request whose output cannot be made."""
        self.requests: dict[str, RequestState] = {}
        self._abort = abort

    def process(self, new: Iterable[SequenceOutput], now: float) -> list[RequestOutput]:
        """Return one output for each request that has something to report of a step, which ended `now`. Finished requests leave."""
        updated: dict[str, RequestState] = {}
        for seq, token_ids, status in new:
            state = updated[seq.request_id] = self.requests[seq.request_id]
            state.answers[seq.index].update(token_ids, status is not None)
        outputs = []
        for request_id, state in updated.items():
            finished = state.finished
            if finished or state.streams or state.metrics.first_token_time is None:
                state.note_progress(now)
            if finished:
                del self.requests[request_id]
            if finished or state.streams:
                outputs.append(self.report(state))
        return outputs

    def report(self, state: RequestState) -> RequestOutput:
        """Return the output of a request. If it cannot be made (a tokenizer failed), the log says why, the request is aborted, and its output has no text."""
        try:
            return state.output()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # a panic in a tokenizer's Rust is no Exception
            self.requests.pop(state.request_id, None)
            self._abort(*(seq for seq in state.seqs if not seq.status.is_finished))
            return without_text(state)


class RequestState:
    """A request that is being served, and the part of it that was reported. `streams`: whether there are outputs before the last."""

    def __init__(self, request_id: str, seqs: list[Sequence], kind: RequestOutputKind, arrival: float) -> None:
        self.request_id = request_id
        self.seqs = seqs
        self.metrics = RequestMetrics(arrival, num_prompt_tokens=seqs[0].num_prompt_tokens)
        self._kind = kind
        self.streams = kind is not RequestOutputKind.FINAL_ONLY
        self.answers = [Answer(seq) for seq in seqs]
        self.prompt = seqs[0].request.prompt
        self.prompt_token_ids = list(seqs[0].request.prompt_token_ids)  # users may do with it as they like
        self._prompt_was_scored = False  # and a report said so

    @property
    def finished(self) -> bool:
        """Whether all answers are over."""
        return all(map(IS_FINISHED, self.seqs))

    def note_progress(self, now: float) -> None:
        """Take the times of a step that ended `now`."""
        self.metrics.num_generated_tokens = sum(seq.num_output_tokens for seq in self.seqs)
        if self.metrics.first_token_time is None and self.metrics.num_generated_tokens:
            self.metrics.first_token_time = now
        if self.finished:
            self.metrics.finish_time = now

    def end(self, now: float) -> None:
        """End all answers, as the scheduler has, and take the times."""
        for answer in self.answers:
            if not answer.has_ended:
                answer.update([], has_ended=True)
        self.note_progress(now)

    def output(self) -> RequestOutput:
        """The request as it is, with what is new since the last call as deltas."""
        first, m, prompt_logprobs = self.seqs[0], self.metrics, None
        finished, deltas_alone = self.finished, self._kind is RequestOutputKind.DELTA
        if first.params.prompt_logprobs is not None and not (deltas_alone and self._prompt_was_scored):
            prompt_logprobs = prompt_logprobs_of(first)
            self._prompt_was_scored = prompt_logprobs is not None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[answer.report(deltas_alone) for answer in self.answers if not deltas_alone or answer.has_news],
            finished=finished,
            metrics=RequestMetrics(  # a copy; `dataclasses.replace` takes ten times as long
                m.arrival_time, m.first_token_time, m.finish_time, m.num_prompt_tokens, m.num_generated_tokens
            ),
            num_cached_tokens=getattr(first.prefix, "num_hit_tokens", None) or 0,
            prompt_logprobs=prompt_logprobs,
        )


class Answer:
    """One answer of a request, and how much of it was reported.

    Attributes:
        token_ids, num_tokens: all so far. new_token_ids: those not reported yet. num_chars: characters that were reported.
        has_news: whether tokens, or the end, were not reported. has_ended: whether it ended.
    """

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq
        self.num_tokens, self.token_ids, self.new_token_ids = 0, list[int](), list[int]()
        self.has_news = self.has_ended = False
        self.num_chars = 0
        self._cumulative_logprob = 0.0  # of the tokens that were reported

    def update(self, token_ids: list[int], has_ended: bool) -> None:
        """Process the tokens that have joined the answer, and whether they ended it."""
        self.num_tokens += len(token_ids)
        self.token_ids += token_ids
        self.new_token_ids += token_ids
        self.has_news, self.has_ended = True, has_ended

    def report(self, deltas_alone: bool) -> CompletionOutput:
        """The answer as it is, or with `deltas_alone` what is new in it."""
        seq = self.seq
        old_chars, new = self.mark_reported()  # `num_chars` is the new end of the text from here on
        first_char = old_chars if deltas_alone else 0
        first_token = self.num_tokens - len(new) if deltas_alone else 0
        has_logprobs = seq.params.logprobs is not None
        return CompletionOutput(
            index=seq.index,
            text=seq.detokenizer.read(first_char, self.num_chars),
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=seq.logprobs[first_token : self.num_tokens] if has_logprobs else None,
            finish_reason=seq.status.value if seq.status.is_finished else None,
            stop_reason=seq.stop_reason,
            delta_text=seq.detokenizer.read(old_chars, self.num_chars),
            delta_token_ids=new,
        )

    def mark_reported(self) -> tuple[int, list[int]]:
        """Mark what is new as reported; returns at which character it begins, and its tokens."""
        old_chars, new, seq = self.num_chars, self.new_token_ids, self.seq
        if self.has_news:
            self.num_chars, self.new_token_ids, self.has_news = num_visible_chars(seq), [], False
            if seq.logprobs:  # those of tokens behind a stop are dropped
                rows = seq.logprobs[self.num_tokens - len(new) : self.num_tokens]
                self._cumulative_logprob += sum(chosen(row).logprob for row in rows)
        return old_chars, new


def num_visible_chars(seq: Sequence) -> int:
    """Decode; return how many characters may be shown: the last may begin a stop string. It drops an end token, so it is called once after the end (`has_news`)."""
    detokenizer = seq.detokenizer
    if seq.status.is_finished:
        # A stop string's `stop_reason` is a text, a stop token's its id, end-of-text's None.
        token_ended = seq.status is SequenceStatus.FINISHED_STOPPED and not isinstance(seq.stop_reason, str)
        if token_ended and not seq.params.include_stop_str_in_output:
            detokenizer.forget_last()  # not decoded yet: `check_stop_conditions` looks at token ids before it decodes
        detokenizer.flush()
        return detokenizer.num_chars
    detokenizer.advance()
    held_back = max(map(len, seq.params.stop)) - 1 if seq.params.stop else 0
    return max(0, detokenizer.num_chars - held_back)
