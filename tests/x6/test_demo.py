"""The demo: its rewards, its loop, and what it leaves."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from folovllm import LLM
from folovllm.electives.rollouts import demo
from folovllm.electives.rollouts.demo_options import Options

SMALL = Options(groups=2, answers=2, max_tokens=12, iterations=2)


def test_rewards_count_whole_words_and_look_at_the_length() -> None:
    seventy = " ".join(["word"] * 67 + ["Red", "red,", "bored"])
    assert demo.count_of("red", seventy) == 2, '"bored" is no colour'
    assert demo.reward_of("red", seventy) == pytest.approx((2 / 3, 1))
    assert demo.reward_of("red", "red " * 60) == pytest.approx((1, 0.75)), "more than three count as three"
    assert demo.reward_of("red", "word " * 100) == pytest.approx((0, 0.25)), "as long as the model's own stories"
    assert demo.reward_of("red", "word " * 110) == (0, 0)


def test_rollouts_are_exactly_on_policy_and_the_weights_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """By another reward, for stories so short earn none: each letter counts."""
    monkeypatch.setattr(demo, "reward_of", lambda colour, story: (float(len(story)), 0.0))
    with LLM(device="cpu", use_tqdm=False, batch_invariant=True, max_num_seqs=8, num_kv_blocks=300) as llm:
        before = {name: w.clone() for name, w in llm.get_weights().items()}
        first, second = islice(demo.train(llm, SMALL), 2)
        assert first.off_policy == second.off_policy == 0, "engine and trainer differ in a bit around an update"
        assert first.rollout_tokens == 2 * 2 * 12
        assert any(not torch.equal(w, before[name]) for name, w in llm.get_weights().items())


def test_each_group_has_noise_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed for all would give each colour the same stories: a quarter of what can be learned from."""
    monkeypatch.setattr(demo, "learn", lambda *_: 0.0)
    with LLM(device="cpu", use_tqdm=False, max_num_seqs=8, num_kv_blocks=300) as llm:
        asked = []
        generate = llm.generate

        def noted(prompts: Any, params: Any, **options: Any) -> Any:
            asked.append([(each.seed, each.temperature) for each in params])
            return generate(prompts, params, **options)

        llm.generate = noted
        list(islice(demo.train(llm, replace(SMALL, max_tokens=1)), 2))
    assert len({seed for seeds in asked for seed, _ in seeds}) == 4
    assert {temperature for seeds in asked for _, temperature in seeds} == {1.0}, "or they are not the policy's own"


def test_without_batch_invariance_they_are_close_and_not_equal() -> None:
    with LLM(device="cpu", use_tqdm=False, max_num_seqs=8, num_kv_blocks=300) as llm:
        first = next(demo.train(llm, replace(SMALL, batch_invariant=False)))
        assert 0 < first.off_policy < 1e-3


def test_an_interrupted_demo_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(llm: LLM, options: Options) -> Iterator[demo.Iteration]:
        yield demo.Iteration(1.0, 0.5, 0.5, 70.0, 0.0, 100, 2.0, 2.0, 0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "train", interrupted)
    run = demo.run_demo(replace(SMALL, batch_invariant=False), tmp_path / "run.json")
    saved = json.loads((tmp_path / "run.json").read_text())
    assert len(run.curve) == len(saved["curve"]) == 1
    assert saved["before"]
    assert saved["after"]
    assert "ended early" in capsys.readouterr().out


def test_threads_are_as_before_after_an_interruption() -> None:
    before = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt), demo.all_cores():
        torch.set_num_threads(before + 1)
        raise KeyboardInterrupt
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("field", "value"), [("groups", 9), ("groups", 0), ("answers", 0), ("iterations", 0)])
def test_numbers_with_which_it_cannot_run_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be .*not {value}"):
        Options(**{field: value})
