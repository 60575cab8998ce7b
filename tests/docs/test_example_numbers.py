"""What chapters 4 to 6 say in their text about A, B and C: the tables in them are written by the engine, these numbers are not."""

from __future__ import annotations

import pytest
import torch

from folovllm.layers.embed_head import ParallelLMHead
from milestones.running_example import Run, engine_for, example, play
from tests.docs.blocks import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four() -> Run:
    return play("m4")


def chapter(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def test_m4_does_what_m3_did(four: Run) -> None:
    assert four.turns == play("m3").turns, "chapter 4: the same steps, the same blocks"
    (scheduled, _) = four.turns[4].scheduled_seqs
    assert (scheduled.token_ids, scheduled.start, scheduled.slots) == ((304,), 12, (36,)), (
        "chapter 4 follows this token"
    )


def test_what_m4_and_m5_compute(four: Run) -> None:
    five = play("m5")
    for run, tokens, steps in ((four, 60, 12), (five, 42, 10)):
        assert sum(scheduled.end - scheduled.start for turn in run.turns for scheduled in turn.scheduled_seqs) == tokens
        assert len(run.turns) == steps
    assert "M4 computes 60 tokens for them, M5 42." in chapter("5_reuse")
    assert (five.turns[2].hits, five.turns[7].hits) == ({"C": 8}, {"C": 12})
    chunk = five.turns[1].scheduled_seqs[1]
    assert (chunk.name, chunk.start, chunk.end) == ("B", 3, 12), "chapter 4 asks for its cu_seqlens"


def test_what_each_of_four_ranks_would_find_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of B's answer, in quarters of the vocabulary."""
    seen: list[torch.Tensor] = []
    head = ParallelLMHead.forward

    def noted(self: ParallelLMHead, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(head(self, hidden, out).clone())
        return seen[-1]

    monkeypatch.setattr(ParallelLMHead, "forward", noted)
    engine, request = engine_for("m2"), example().request("B")
    engine.generate([list(request.prompt_token_ids)])
    engine.close()
    best, row = seen[0][0].view(4, 1024).max(-1)
    assert row.tolist() == [373, 654, 277, 77] and int(seen[0][0].argmax()) == request.answer_token_ids[0] == 1678
    assert all(f"{logit:.2f}" in chapter("6_speed_and_scale") for logit in best.tolist())
