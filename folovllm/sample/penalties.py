"""What depends on the tokens so far: penalties for repeating, and no end before `min_tokens`."""

from __future__ import annotations

import torch

from folovllm.request import Sequence


def apply_penalties(logits: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    """Make tokens that were seen less likely, in the rows [V] of `logits` [S, V] whose requests ask for it.

    The repetition penalty divides a positive logit and multiplies a negative one, for tokens of prompt and answer
    (CTRL, Keskar et al. 2019). Presence and frequency penalties are subtracted for tokens of the answer, once and once
    per occurrence.
    """
    if not any(seq.params.has_penalties for seq in seqs):
        return logits
    logits = logits.clone()
    for row, seq in zip(logits, seqs, strict=True):
        if seq.params.has_penalties:
            _penalize(row, seq)
    return logits


def _penalize(row: torch.Tensor, seq: Sequence) -> None:
    params = seq.params
    seen = torch.from_numpy(seq.token_ids).to(row.device, torch.int64).unique()
    values = row[seen]
    factor = params.repetition_penalty
    row[seen] = torch.where(values > 0, values / factor, values * factor)
    answer = torch.from_numpy(seq.output_token_ids).to(row.device, torch.int64)
    counts = torch.bincount(answer, minlength=row.numel())
    row -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts


def forbid_stop_tokens(logits: torch.Tensor, seqs: list[Sequence]) -> torch.Tensor:
    """Rule out, in `logits` [S, V], every token that would end an answer which is shorter than its `min_tokens`."""
    early = [i for i, seq in enumerate(seqs) if seq.num_output_tokens + seq.num_in_flight < seq.params.min_tokens]
    if not early:
        return logits
    logits = logits.clone()
    for i in early:
        ids = [*seqs[i].eos_token_ids, *seqs[i].params.stop_token_ids]
        logits[i, ids] = -torch.inf
    return logits
