"""Log-probabilities of the sampled tokens and of the most likely ones. They stay on the device until a caller copies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.schedule import Logprobs, ScheduledSequence
from folovllm.step.scores import Scores, tokens_to_score

SCORED_AT_ONCE = 1 << 22  # logits; with their temporaries about 100 MB


class SampledLogprobs(NamedTuple):
    """The sampled token of each of n sequences, then its K most likely tokens."""

    ids: torch.Tensor  # [n, 1 + K] int64
    values: torch.Tensor  # [n, 1 + K] float32
    ranks: torch.Tensor  # [n] int64: number of tokens that are at least as likely as the sampled one

    def to_host(self, non_blocking: bool = False) -> SampledLogprobs:
        """Return a copy in host memory. With `non_blocking` the copy is only queued: wait for an event before you read it."""
        return SampledLogprobs(*(part.to("cpu", non_blocking=non_blocking) for part in self))

    def of(self, i: int, k: int) -> Logprobs:
        """Return sequence i's sampled token and its `k` most likely ones, in the format of the request's output."""
        ids, values = self.ids[i, : 1 + k].tolist(), self.values[i, : 1 + k].tolist()
        return list(zip(ids, values, [int(self.ranks[i]), *range(1, len(ids))], strict=True))


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> SampledLogprobs:
    """Return log-probabilities of the sampled `tokens` and of the `k` most likely ones, under the model's own distribution.

    Of equally likely tokens the lower id comes first. The host waits for nothing.

    Args:
        logits: [n, V], any float dtype, as the model computed them. tokens: [n] int64.
        k: the number of most likely tokens; K is V if k is larger.
    """
    logprobs = logits.float().log_softmax(-1)  # [n, V]
    ids = tokens[:, None]
    if k:  # the sampled token alone, as rollouts want it, needs no order
        most_likely = _order(logprobs).topk(min(k, logprobs.shape[1])).indices
        ids = torch.cat([ids, most_likely], dim=1)
    values = logprobs.gather(1, ids)
    return SampledLogprobs(ids, values, (logprobs >= values[:, :1]).sum(-1))


def logprobs_of_rows(logits: torch.Tensor, tokens: list[int], counts: Sequence[int | None]) -> list[Logprobs | None]:
    """Return the sampled token and so many most likely ones of each row of `logits` [S, V]; None where the count is None."""
    wanted = {i: count for i, count in enumerate(counts) if count is not None}
    at = torch.tensor(list(wanted), device=logits.device)
    found = gather_logprobs(logits[at], torch.tensor(tokens, device=logits.device)[at], max(wanted.values()))
    rows: list[Logprobs | None] = [None] * len(counts)
    for n, (i, count) in enumerate(wanted.items()):
        rows[i] = found.of(n, count)
    return rows


def score(
    logits_after: Callable[[torch.Tensor], torch.Tensor],
    after: torch.Tensor,
    tokens: torch.Tensor,
    k: int,
    vocab_size: int,
) -> SampledLogprobs:
    """Return log-probabilities of prompt tokens, as `gather_logprobs` does. Only a few tokens have logits at the same time.

    Args:
        logits_after: takes indices of tokens in the step, [m] int64, and returns their logits [m, V].
        after: [n] int64, the index in the step of the token before each of `tokens` [n] int64.
    """
    size = num_scored_at_once(vocab_size)
    pieces = zip(after.split(size), tokens.split(size), strict=True)
    parts = [gather_logprobs(logits_after(at), own, k) for at, own in pieces]
    return SampledLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def score_prompts(
    scheduled_seqs: Sequence[ScheduledSequence],
    logits_after: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
    device: torch.device,
) -> dict[int, list[Logprobs]]:
    """Return the log-probabilities for `ScheduledSequence.scores`, by index of the sequence. `logits_after`: see `score`."""
    wanted = tokens_to_score(scheduled_seqs)
    _, after, tokens, counts = torch.tensor(wanted, device=device).T
    found = score(logits_after, after, tokens, int(counts.max()), vocab_size)
    return by_sequence(found.to_host(), wanted)


def score_hidden(
    model: Any, scheduled_seqs: Sequence[ScheduledSequence], hidden: torch.Tensor, batch: ForwardBatch
) -> dict[int, list[Logprobs]]:
    """As `score_prompts`, from the hidden states [T, H] that an unsharded model has computed of the step."""

    def logits_after(at: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model.compute_logits(hidden, replace(batch, logits_indices=at))
        return logits

    return score_prompts(scheduled_seqs, logits_after, len(model.lm_head.weight), hidden.device)


def score_in_pieces(
    logits_of: Callable[[torch.Tensor, int], torch.Tensor], input_ids: torch.Tensor, scores: Scores, vocab_size: int
) -> tuple[torch.Tensor, list[Logprobs]]:
    """Return the logits [1, V] after the tokens [1, T], and the log-probabilities of the prompt.

    `logits_of(piece, 0)` are the logits [1, n, V] of all tokens of a piece at once, which is therefore small.
    """
    tokens, rows, start = torch.from_numpy(scores.token_ids).long(), [], 0
    for piece in input_ids.split(num_scored_at_once(vocab_size), dim=1):
        logits = logits_of(piece, 0)[0]  # [n, V]
        first, end = max(start, scores.first), min(start + len(logits), scores.first + len(tokens))
        if first < end:
            scored = tokens[first - scores.first : end - scores.first].to(logits.device)
            found = gather_logprobs(logits[first - start : end - start], scored, scores.num_top).to_host()
            rows += [found.of(n, scores.num_top) for n in range(len(scored))]
        start += len(logits)
    return logits[-1:], rows


def num_scored_at_once(vocab_size: int) -> int:
    """Return how many prompt tokens may have logits at the same time."""
    return max(1, SCORED_AT_ONCE // vocab_size)


def by_sequence(found: SampledLogprobs, wanted: Sequence[Sequence[int]]) -> dict[int, list[Logprobs]]:
    """Return the log-probabilities of the `wanted` tokens [n] (`tokens_to_score`), by index of the scheduled sequence."""
    rows: dict[int, list[Logprobs]] = {}
    for n, (i, _, _, count) in enumerate(wanted):
        rows.setdefault(i, []).append(found.of(n, count))
    return rows


def _order(values: torch.Tensor) -> torch.Tensor:
    """Return integers [n, V] in the order of `values` [n, V] float32, without ties: of equal values the lower column is larger."""
    bits = values.view(torch.int32)
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    return ordered << 32 | (values.shape[1] - 1 - torch.arange(values.shape[1], device=values.device))
