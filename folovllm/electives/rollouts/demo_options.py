"""The choices of `folovllm rl demo`, apart from the demo so that `--help` need not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass

COLOURS = ("red", "blue", "green", "yellow", "pink", "silver", "orange", "purple")


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
    max_tokens: int = 160
    learning_rate: float = 5e-4
    seed: int = 0
    batch_invariant: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for numbers with which the demo cannot run."""
        if not 1 <= self.groups <= len(COLOURS):
            raise ValueError(f"groups must be 1 to {len(COLOURS)}, the number of colours, not {self.groups}")
        for name in ("iterations", "answers", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
