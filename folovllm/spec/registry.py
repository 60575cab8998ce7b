"""Which proposer stands behind which name, and who says how far to guess."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from folovllm.executor.abstract import Executor
from folovllm.setup import EngineSetup
from folovllm.spec.adaptive import AdaptiveDepth
from folovllm.spec.budget import Budget
from folovllm.spec.choose import StepCost
from folovllm.spec.measure import clock_for, measure_guesses, measure_steps
from folovllm.spec.ngram import NgramProposer
from folovllm.spec.proposer import Depth, FixedDepth, Proposer, RowState
from folovllm.spec.shadow import Shadow
from folovllm.spec.suffix import SuffixProposer
from folovllm.speculative_config import SpeculativeConfig
from folovllm.step.draw import TokenIds

LOAN = 8  # plain steps of one sequence: what may be lost before any time has passed
SAVED = 16  # the same: what may be saved up, and lost where texts stop to repeat themselves

MakeDraft = Callable[[str], Proposer]


class InTurn(Proposer):
    """Asks one proposer after the other, until each sequence has a guess."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers
        self.is_dear = any(proposer.is_dear for proposer in proposers)

    def propose(self, state: RowState, k: int) -> list[int]:
        """As `Proposer`."""
        return next((guess for one in self._proposers if (guess := list(one.propose(state, k)))), [])

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`."""
        found: list[list[int]] = [[] for _ in states]
        self.work = None
        for proposer in self._proposers:
            left = [0 if guess else k for guess, k in zip(found, ks, strict=True)]
            if any(left):
                more = proposer.propose_all(states, left)
                found = [guess or other for guess, other in zip(found, more, strict=True)]
                self.work = self.work or proposer.work
        return found

    def tokens_of(self, guess: Sequence[int]) -> list[int]:
        """As `Proposer`."""
        for proposer in self._proposers:
            guess = proposer.tokens_of(guess)
        return list(guess)

    def admit(self, state: RowState) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.admit(state)

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.observe(seq_id, token_ids)

    def look(self, states: Sequence[RowState]) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.look(states)

    def finish(self, seq_id: int) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.finish(seq_id)

    def close(self) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.close()

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.remember(answer, cache_salt)


def make_proposer(config: SpeculativeConfig, make_draft: MakeDraft) -> Proposer:
    """The proposer of that name. `make_draft` loads a small model. Raises ValueError where it cannot be had."""
    if not isinstance(config.method, str):
        return config.method

    def one(name: str) -> Proposer:
        if name == "ngram":
            return NgramProposer(config.prompt_lookup_min, config.prompt_lookup_max)
        if name == "suffix":
            return SuffixProposer()
        assert config.model is not None
        return make_draft(config.model)

    proposers = [one(name) for name in config.methods]
    return proposers[0] if len(proposers) == 1 else InTurn(proposers)


def make_depth(
    config: SpeculativeConfig, setup: EngineSetup, executor: Executor, proposer: Proposer
) -> tuple[Proposer, Depth, Budget | None]:
    """Who says how many tokens to guess, the proposer as that one needs it, and what both may lose; None: all that they like.

    Under torchrun each rank has a scheduler of its own, and all must decide the same: there time may have no say.
    """
    most = config.num_speculative_tokens
    if not config.adaptive or not isinstance(config.method, str) or "TORCHELASTIC_RUN_ID" in os.environ:
        return proposer, FixedDepth(most), None
    is_dear = "draft_model" in config.methods
    cost, clock = measure_steps(executor, setup, most), clock_for(setup)
    if is_dear:
        measure_guesses(executor, setup, proposer, most, cost)
    budget = make_budget(cost, clock)
    depth = AdaptiveDepth(cost, most, budget, probe=is_dear)
    return Shadow(proposer, depth, budget, k=min(4, most), most=0 if is_dear else 4), depth, budget


def make_budget(cost: StepCost, clock: Callable[[], float]) -> Budget:
    """For looks, decisions and tries together.

    By it guesses lose at most 0.5% of the time, the loan, what was saved of what they won, and the last try. With an answer
    that has a form one decision in 64 steps more is not paid for; nor, once all is spent, are steps with guesses for such
    answers alone.
    """
    return Budget(SAVED * cost.of_plain(1), clock, LOAN * cost.of_plain(1))
