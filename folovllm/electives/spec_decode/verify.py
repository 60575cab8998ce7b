"""Verification: how many of the tokens that a sequence sampled in one step count.

A sequence with a draft computes its newest token and k draft tokens, and samples k + 1 tokens: one after each of
them. Noise depends on (seed, position, token id) alone. So each sample is the one that a step of its own would make,
as long as all draft tokens before it are accepted. No draft token is rejected by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from folovllm.electives.spec_decode.draft_steps import draft_buckets, late_draft, steps_with_drafts
from folovllm.step.packed import NOTHING
from folovllm.worker.buckets import Bucket

if TYPE_CHECKING:
    from folovllm.electives.spec_decode.chain import DraftTokens
    from folovllm.worker.graph_runner import GraphRunner
    from folovllm.worker.pending_step import Ids

FEW = 256


def max_samples(max_num_seqs: int) -> int:
    """Return how many tokens the running sequences may sample in a step with drafts: logits for more have no memory."""
    return max(max_num_seqs, FEW)


def accept(sampled: Sequence[int], draft: Sequence[int]) -> list[int]:
    """Return the tokens that plain decoding would have sampled: the accepted draft tokens, and one more.

    Args:
        sampled: [k + 1]; token i was sampled as if the first i draft tokens were accepted.
        draft: [k]. A draft token is accepted if it equals the sampled token, and all before it were accepted.

    Returns:
        1 to k + 1 tokens. The last one was sampled after accepted tokens alone, so it counts although it was not drafted.
    """
    num_accepted = 0
    while num_accepted < len(draft) and sampled[num_accepted] == draft[num_accepted]:
        num_accepted += 1
    return list(sampled[: num_accepted + 1])


@dataclass(slots=True, frozen=True)
class DraftVerifier:
    """Accepts the draft tokens that were sampled, and resolves placeholder ids.

    Attributes:
        num_samples: the most samples of a step with drafts, without those of sequences that it admits.
        drafted: the draft tokens behind the placeholder ids of a step, if steps bring any.
    """

    num_samples: int
    drafted: DraftTokens | None = None

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        if self.drafted is not None:
            self.drafted.resolve_on_device(tokens)

    def accepted(self, sampled: list[list[int]], sequences: Sequence[int], tokens: Ids) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in sampled]
        resolved = tokens if self.drafted is None else self.drafted.resolve(tokens)
        for i, token in zip(sequences, resolved.tolist(), strict=True):
            if token != NOTHING:
                drafts[i].append(token)
        return [accept(own, draft) if own else [] for own, draft in zip(sampled, drafts, strict=True)]

    def buckets(self) -> list[Bucket]:
        return draft_buckets(self.num_samples)

    def warm_up(self, runner: GraphRunner) -> None:
        runner.warm_up(steps_with_drafts(runner._setup, self.num_samples))
        with torch.inference_mode():
            step, masks = late_draft(runner._setup)
            runner.execute_model(step)
            pending = runner.execute_model(masks)
            assert pending is not None
            pending.wait()
