"""What depends on the tokens so far: penalties for repeating, and no end before `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from folovllm.step.draw import DrawSpec


class TokenCounts:
    """Which tokens of the vocabulary a sequence has seen, and how often."""

    def __init__(self, spec: DrawSpec, vocab_size: int, device: torch.device) -> None:
        prompt, answer = spec.history[: spec.num_prompt_tokens], spec.answer
        self._in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)  # [V]
        self._in_answer = torch.zeros(vocab_size, device=device)  # [V] float32
        self._in_prompt[torch.from_numpy(prompt).to(device, torch.int64)] = True
        self.note(torch.from_numpy(answer).to(device, torch.int64))

    def note(self, tokens: torch.Tensor) -> None:
        """Count tokens of the answer, [n] int64."""
        self._in_answer.index_add_(0, tokens, self._in_answer.new_ones(len(tokens)))

    def penalize(self, row: torch.Tensor, spec: DrawSpec) -> torch.Tensor:
        """The logits [V] of the next token, float32, with the penalties of `spec`.

        The repetition penalty divides a positive logit and multiplies a negative one, for tokens of prompt and answer
        (CTRL, Keskar et al. 2019). Presence and frequency penalties are subtracted for tokens of the answer, once and
        once per occurrence.
        """
        factor, answered = spec.repetition_penalty, self._in_answer > 0
        repeated = torch.where(row > 0, row / factor, row * factor)
        row = torch.where(self._in_prompt | answered, repeated, row)
        return row - (spec.presence_penalty * answered + spec.frequency_penalty * self._in_answer)


def apply_penalties(
    logits: torch.Tensor, specs: Sequence[DrawSpec], counts: Sequence[TokenCounts | None]
) -> torch.Tensor:
    """Make tokens that were seen less likely, in the rows [V] of `logits` [S, V] whose requests ask for it."""
    if not any(counts):
        return logits
    logits = logits.clone()
    for i, (spec, own) in enumerate(zip(specs, counts, strict=True)):
        if own is not None:
            logits[i] = own.penalize(logits[i], spec)
    return logits


def forbid_stop_tokens(logits: torch.Tensor, specs: Sequence[DrawSpec], positions: Sequence[int]) -> torch.Tensor:
    """Rule out, in `logits` [S, V], every token that would end an answer which is shorter than its `min_tokens`.

    Args:
        positions: [S], of the tokens to draw.
    """
    early = [i for i, (spec, at) in enumerate(zip(specs, positions, strict=True)) if at < spec.first_end]
    if not early:
        return logits
    logits = logits.clone()
    for i in early:
        logits[i, list(specs[i].forbidden)] = -torch.inf
    return logits
