"""Log-probabilities of the tokens that were drawn and of the most likely ones, left on the device until somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class LogprobsBuffer:
    """Where the log-probabilities of a step go: for each sequence the drawn token first, then the K most likely."""

    ids: torch.Tensor  # [n, 1 + K] int64
    values: torch.Tensor  # [n, 1 + K] float32
    ranks: torch.Tensor  # [n] int64: 1 if nothing is more likely than the drawn token

    @classmethod
    def allocate(cls, num_seqs: int, num_logprobs: int, device: torch.device | str) -> LogprobsBuffer:
        """For up to `num_seqs` sequences and K = `num_logprobs`; in host memory it is pinned where there is a GPU."""
        pinned = str(device) == "cpu" and torch.cuda.is_available()
        shape = (num_seqs, 1 + num_logprobs)
        return cls(
            ids=torch.zeros(shape, dtype=torch.int64, device=device, pin_memory=pinned),
            values=torch.zeros(shape, dtype=torch.float32, device=device, pin_memory=pinned),
            ranks=torch.zeros(num_seqs, dtype=torch.int64, device=device, pin_memory=pinned),
        )

    def first(self, num_seqs: int) -> LogprobsBuffer:
        """A view of the first `num_seqs` sequences."""
        return LogprobsBuffer(self.ids[:num_seqs], self.values[:num_seqs], self.ranks[:num_seqs])

    def copy_from(self, other: LogprobsBuffer) -> None:
        """Queue a copy of all of it, between host and device; whoever reads waits for an event."""
        self.ids.copy_(other.ids, non_blocking=True)
        self.values.copy_(other.values, non_blocking=True)
        self.ranks.copy_(other.ranks, non_blocking=True)

    def of(self, i: int, k: int) -> list[tuple[int, float]]:
        """Sequence i's drawn token and its `k` most likely, as (id, log-probability); for a buffer of the host."""
        return list(zip(self.ids[i, : 1 + k].tolist(), self.values[i, : 1 + k].tolist(), strict=True))


def gather_logprobs(logits: torch.Tensor, at: torch.Tensor, tokens: torch.Tensor, out: LogprobsBuffer) -> None:
    """Leave the log-probabilities of some sequences of a step in `out`, under the model's own distribution.

    Of equally likely tokens the lower id comes first. With a vocabulary smaller than K the last columns are not written.
    Only device work is queued.

    Args:
        logits: [S, V], any float dtype, as the model gave them.
        at: [n] int64, which sequences. tokens: [S] int64, what they drew.
        out: for n sequences.
    """
    logprobs = logits[at].float().log_softmax(-1)  # [n, V]
    drawn = tokens[at][:, None]
    value = logprobs.gather(1, drawn)
    out.ids[:, :1], out.values[:, :1] = drawn, value
    out.ranks.copy_((logprobs > value).sum(-1) + 1)
    k = min(out.ids.shape[1] - 1, logprobs.shape[1])
    ids = _order(logprobs).topk(k).indices
    out.ids[:, 1 : 1 + k], out.values[:, 1 : 1 + k] = ids, logprobs.gather(1, ids)


def _order(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers [n, V] without ties: ordered as `values` [n, V] float32, and lower columns first among equals."""
    bits = values.view(torch.int32)
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()
    return ordered << 32 | (values.shape[1] - 1 - torch.arange(values.shape[1], device=values.device))
