"""The choices of `folovllm rl demo`, apart from the demo so that `--help` need not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Options:
    """What the demo does.

    Attributes:
        iterations: how often it rolls out and learns.
        groups: prompts of an iteration, each with a colour of its own.
        answers: rollouts of a prompt; their mean reward is what each is compared with.
        max_tokens: longest rollout.
        learning_rate: of AdamW.
        seed: of colours and rollouts.
        batch_invariant: let engine and trainer compute the same bits; without it the ratio shows how far they are apart.
    """

    iterations: int = 30
    groups: int = 4
    answers: int = 8
    max_tokens: int = 80
    learning_rate: float = 2e-4
    seed: int = 0
    batch_invariant: bool = True
