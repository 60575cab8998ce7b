"""What is new in the answers of a request when its reader looks, which may be many steps after it looked last."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from folovllm.engine.output_processor import Answer, RequestState
from folovllm.outputs import TokenLogprob


class OutputDelta(NamedTuple):
    """What is new in an answer, for servers. Programs get a `CompletionOutput`."""

    answer: int  # among the `n`
    text: str
    logprobs: list[dict[int, TokenLogprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None
    offsets: SequenceOf[int] = ()  # where the tokens begin in the answer's text, if their log-probabilities are given


def catch_up(request: RequestState) -> None:
    """Tell each answer of what its sequence got since the last look."""
    for answer in request.answers:
        new, ended = answer.seq.output_token_ids[answer.num_tokens :].tolist(), answer.seq.status.is_finished
        if new or ended != answer.has_ended:
            answer.update(new, ended)


def new_deltas(request: RequestState) -> list[OutputDelta]:
    """What is new since the last look, of those answers that have news."""
    return [_delta(answer) for answer in request.answers if answer.has_news]


def _delta(answer: Answer) -> OutputDelta:
    seq, (old_chars, new_token_ids) = answer.seq, answer.take_news()
    first, end = answer.num_tokens - len(new_token_ids), answer.num_tokens
    return OutputDelta(
        seq.index,
        seq.detokenizer.read(old_chars, answer.num_chars),
        None if seq.params.logprobs is None else seq.logprobs[first:end],
        seq.status.value if answer.has_ended else None,
        seq.stop_reason,
        (seq.detokenizer.offsets or ())[first:end],
    )
