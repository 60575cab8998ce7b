"""Which proposer stands behind which name, and who says how far to guess."""

from __future__ import annotations

import os
from collections.abc import Callable

from folovllm.executor.abstract import Executor
from folovllm.setup import EngineSetup
from folovllm.spec_decode.adaptive import AdaptiveDepth
from folovllm.spec_decode.budget import Budget
from folovllm.spec_decode.choose import StepCost
from folovllm.spec_decode.config import SpeculativeConfig
from folovllm.spec_decode.measure import clock_for, measure_guesses, measure_steps
from folovllm.spec_decode.ngram import NgramProposer
from folovllm.spec_decode.proposer import Depth, FixedDepth, InTurn, Proposer
from folovllm.spec_decode.shadow import Shadow
from folovllm.spec_decode.suffix import SuffixProposer

LOAN = 8  # plain steps of one sequence: what may be lost before any time has passed
SAVED = 16  # the same: what may be saved up, and lost where texts stop to repeat themselves

MakeDraft = Callable[[str], Proposer]


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
