"""Log-probabilities on their way from a step to a request's output."""

from __future__ import annotations

from folovllm.engine.spelling import Spelling
from folovllm.outputs import TokenLogprob
from folovllm.request import Sequence
from folovllm.step.schedule import Logprobs, Scores


def keep_logprobs(seq: Sequence, scores: Scores | None, rows: list[Logprobs]) -> None:
    """Take in the log-probabilities of a step: first those of the prompt's tokens, then those of sampled tokens."""
    shown = [with_text(row, seq.detokenizer.spelling) for row in rows]
    num_scores = 0 if scores is None else len(scores.token_ids)
    seq.prompt_logprobs += shown[:num_scores]
    seq.logprobs += shown[num_scores:]
    del seq.logprobs[seq.num_output_tokens :]  # of tokens behind the one that ended the answer


def chosen(row: dict[int, TokenLogprob]) -> TokenLogprob:
    """The entry of the token that was sampled: it comes first."""
    return next(iter(row.values()))


def with_text(row: Logprobs, spelling: Spelling | None) -> dict[int, TokenLogprob]:
    """A token's log-probability and those of likely others, by token id. Without `spelling` they have no text."""
    return {id_: TokenLogprob(id_, value, rank, *(spelling[id_] if spelling else (None,))) for id_, value, rank in row}
