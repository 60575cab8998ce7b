"""`tools/referee.py` on a CPU: the engine's steps in one graph, and the check of their logits."""

import math

import pytest
import torch

from tools import referee


def test_the_engine_is_judged_by_the_comparisons_rules(capsys: pytest.CaptureFixture[str]) -> None:
    referee.main(["--shape", "tiny", "--device", "cpu", "--prompts", "2", "--answer", "4"])
    said = capsys.readouterr().out
    assert referee.THEIRS in said
    assert "FoloVLLM, one graph of 3 steps" in said
    assert "all replays gave the tokens of the engine's own steps: yes" in said
    errors = said.partition("errors of FoloVLLM: ")[2].splitlines()[0]
    ours, theirs = (part.split(", ") for part in errors.split("; of Hugging Face's bfloat16: "))
    assert all(0 < float(a) < 3 * float(b) for a, b in zip(ours, theirs, strict=True)), "rounding, and no more"


def test_both_errors_of_a_distribution() -> None:
    true, got = (torch.tensor([list(map(math.log, row))]) for row in ([0.5, 0.25, 0.25], [0.25, 0.5, 0.25]))
    kl, log = referee.errors(got, true, [1])
    assert kl == pytest.approx(0.25 * math.log(2)), "0.5 log 2 - 0.25 log 2"
    assert log == pytest.approx(math.log(2))
