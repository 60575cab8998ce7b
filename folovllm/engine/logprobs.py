"""Log-probabilities on their way to a request's output: those of sampled tokens, and those of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from folovllm.engine.spelling import Spelling
from folovllm.outputs import TokenLogprob
from folovllm.request import Sequence
from folovllm.step.schedule import Logprobs, ScheduledSequence
from folovllm.step.scores import Scores


def scores_of(seq: Sequence, start: int, end: int) -> Scores | None:
    """The tokens of the prompt that tokens `start` to `end` predict, and whose scores have not come yet."""
    if not seq.num_unscored_tokens:
        return None
    first = max(start, len(seq.prompt_logprobs))  # the token behind it is the first without a score
    tokens = seq.tokens(first + 1, min(end + 1, seq.num_prompt_tokens))
    return Scores(first - start, tokens, seq.params.prompt_logprobs or 0) if len(tokens) else None


def keep_logprobs(
    seqs: SequenceOf[Sequence],
    scheduled_seqs: SequenceOf[ScheduledSequence],
    found: Mapping[int, list[Logprobs]],
    alive: Iterable[int],
) -> None:
    """Give the sequences `alive` of a step what it found: first the prompt's tokens, then sampled ones. All are by index."""
    for i in alive:
        seq, scores = seqs[i], scheduled_seqs[i].scores
        shown = [with_text(row, seq.detokenizer.spelling) for row in found.get(i, ())]
        num_scores = 0 if scores is None else len(scores.token_ids)
        seq.prompt_logprobs += shown[:num_scores]
        seq.logprobs += shown[num_scores:]
        del seq.logprobs[seq.num_output_tokens :]  # of tokens behind the one that ended the answer


def prompt_logprobs_of(seq: Sequence) -> list[dict[int, TokenLogprob] | None] | None:
    """The log-probabilities of the prompt's tokens, None for the first. None if not requested, or not complete yet."""
    if seq.params.prompt_logprobs is None or seq.num_unscored_tokens:
        return None
    return [None, *seq.prompt_logprobs]


def chosen(row: dict[int, TokenLogprob]) -> TokenLogprob:
    """The entry of the token that was sampled: it comes first."""
    return next(iter(row.values()))


def with_text(row: Logprobs, spelling: Spelling | None) -> dict[int, TokenLogprob]:
    """A token's log-probability and those of likely others, by token id. Without `spelling` they have no text."""
    return {id_: TokenLogprob(id_, value, rank, *(spelling[id_] if spelling else (None,))) for id_, value, rank in row}
