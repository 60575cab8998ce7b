"""Log-probabilities of the tokens that were sampled and of the most likely ones, left on the device until they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from folovllm.step.sampling_spec import Logprobs

SCORED_AT_ONCE = 1 << 22  # logits; with what is made of them about 100 MB


@dataclass(slots=True)
class SampledLogprobs:
    """For each of n sequences the sampled token first, then the K most likely."""

    ids: torch.Tensor  # [n, 1 + K] int64
    values: torch.Tensor  # [n, 1 + K] float32
    ranks: torch.Tensor  # [n] int64: how many tokens are at least as likely as the sampled one

    def to_host(self, non_blocking: bool = False) -> SampledLogprobs:
        """A copy in host memory. With `non_blocking` it is only queued: wait for an event before you read it."""
        parts = (part.to("cpu", non_blocking=non_blocking) for part in (self.ids, self.values, self.ranks))
        return SampledLogprobs(*parts)

    def of(self, i: int, k: int) -> Logprobs:
        """Sequence i's sampled token and its `k` most likely, as a request gets them."""
        ids, values = self.ids[i, : 1 + k].tolist(), self.values[i, : 1 + k].tolist()
        return list(zip(ids, values, [int(self.ranks[i]), *range(1, len(ids))], strict=True))


def gather_logprobs(logits: torch.Tensor, tokens: torch.Tensor, k: int) -> SampledLogprobs:
    """Log-probabilities under the model's own distribution: of the sampled `tokens`, and of the `k` most likely.

    Of equally likely tokens the lower id comes first. Only device work is queued.

    Args:
        logits: [n, V], any float dtype, as the model gave them. tokens: [n] int64.
        k: K, or more than V, which is then K.
    """
    logprobs = logits.float().log_softmax(-1)  # [n, V]
    most_likely = _order(logprobs).topk(min(k, logprobs.shape[1])).indices
    ids = torch.cat([tokens[:, None], most_likely], dim=1)
    values = logprobs.gather(1, ids)
    return SampledLogprobs(ids, values, (logprobs >= values[:, :1]).sum(-1))


def score(
    logits_after: Callable[[torch.Tensor], torch.Tensor],
    after: torch.Tensor,
    tokens: torch.Tensor,
    k: int,
    vocab_size: int,
) -> SampledLogprobs:
    """As `gather_logprobs`, for tokens of prompts: with the logits of a few at a time, however long the prompts are.

    Args:
        logits_after: [m] int64, tokens of the step, to their logits [m, V].
        after: [n] int64, the token of the step that each of `tokens` [n] int64 comes after.
    """
    size = num_scored_at_once(vocab_size)
    parts = [
        gather_logprobs(logits_after(at), own, k) for at, own in zip(after.split(size), tokens.split(size), strict=True)
    ]
    return SampledLogprobs(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat([part.ranks for part in parts]),
    )


def num_scored_at_once(vocab_size: int) -> int:
    """Tokens of a prompt whose logits may be there at the same time."""
    return max(1, SCORED_AT_ONCE // vocab_size)


def by_sequence(found: SampledLogprobs, wanted: Sequence[Sequence[int]]) -> dict[int, list[Logprobs]]:
    """What was found of the tokens [n] that were `wanted` (`tokens_to_score`), by index of the scheduled sequence."""
    rows: dict[int, list[Logprobs]] = {}
    for n, (i, _, _, count) in enumerate(wanted):
        rows.setdefault(i, []).append(found.of(n, count))
    return rows


def _order(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers [n, V] without ties: ordered as `values` [n, V] float32, and lower columns first among equals."""
    bits = values.view(torch.int32)
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    return ordered << 32 | (values.shape[1] - 1 - torch.arange(values.shape[1], device=values.device))
