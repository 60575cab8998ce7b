"""Scores are counted, not timed: the same every time, and what they count is what happens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.scheduler import Scheduler, preempt, whole_prompt
from folovllm.request import Sequence, SequenceOutput, SequenceStatus
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput
from milestones.builders import load_file, scorer, scores
from milestones.counting import CountBytes, ToyModel, count_kernel
from milestones.manifest import Course
from milestones.mine import Mine
from milestones.scores import SLOT, CatLoop
from milestones.tasks import Builder
from milestones.virtual import MAX_TOKENS, TRACES, Costs, Request, as_sequence, load_trace, serve
from tests.builders.engines import WITHOUT_MINE
from tools.traces import traces

pytestmark = WITHOUT_MINE
COURSE = Course(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize("builder", COURSE.builders, ids=lambda b: b.id)
def test_a_score_is_the_same_every_time(builder: Builder) -> None:
    component = load_file(builder.reference, builder.symbol)
    first, second = (scorer(builder)(component) for _ in range(2))
    assert first == second and all(value >= 0 for value in first.values())


def test_the_cost_model_gives_what_was_measured() -> None:
    """docs/performance_log.md: 6,661 us for a decode of 256 sequences at about 745 tokens, 0.894 ms for one alone."""

    def seconds(sequences: int, length: int) -> float:
        ids = np.zeros(1, np.int32)
        scheduled_seqs = [ScheduledSequence(i, i, length - 1, length, ids, (), 0, 1, None) for i in range(sequences)]
        return Costs().seconds(SchedulerOutput(tuple(scheduled_seqs)))

    assert seconds(256, 745) == pytest.approx(6.661e-3, rel=0.02)
    assert seconds(1, 256) == pytest.approx(0.894e-3, rel=0.02)


def test_two_requests_by_hand() -> None:
    """Prompts of 16 and 32 tokens at 0 and 1 s, answers of 2 and 1: three steps, between which nothing happens."""
    requests = [Request(0.0, list(range(16)), [1, 2]), Request(1.0, list(range(32)), [3])]
    costs = Costs(fixed=0.1, per_token=0.01, bandwidth=100.0, kv_bytes=1)
    run = serve(Scheduler(BlockManager(8, 16), 2, 64, whole_prompt, preempt), requests, costs)
    prompts = [0.1 + 0.01 * n + n / 100 for n in (16, 32)]
    decode = 0.1 + 0.01 + 17 / 100
    assert list(run.first_token.values()) == pytest.approx(prompts)
    assert prompts[0] + decode < 1 and run.seconds == pytest.approx(1.0 + prompts[1])
    assert run.throughput == pytest.approx(3 / run.seconds) and run.preemptions == 0


def test_who_stands_still_is_stopped() -> None:
    class Still(Scheduler):
        def schedule(self) -> SchedulerOutput:
            return SchedulerOutput()

    with pytest.raises(RuntimeError, match="stands still: 1 requests"):
        serve(Still(BlockManager(8, 16), 2, 64, whole_prompt, preempt), [Request(0.0, [1], [2])])


class TestNoScore:
    """What does not compute the answers, or could not compute them from its cache, is found out while it is scored."""

    def test_an_engine_that_ends_each_answer_after_a_token(self) -> None:
        class Hasty(Scheduler):
            def postprocess(self, sampled: Iterable[tuple[Sequence, list[int]]]) -> list[SequenceOutput]:
                outputs = super().postprocess(sampled)
                for seq in [seq for seq, _, status in outputs if status is None]:
                    seq.finish(SequenceStatus.FINISHED_LENGTH)
                    self.running.remove(seq)
                    self.kv.free(seq)
                return outputs

        with pytest.raises(ValueError, match="an answer ended after 1 of its 160 tokens"):
            scorer(COURSE.builder("m2"))(lambda kv, seqs, budget, tokens: Hasty(kv, seqs, budget, tokens, preempt))

    def test_a_scheduler_that_drops_requests(self) -> None:
        class Forgetful(Scheduler):
            def add(self, seq: Sequence) -> None: ...

        with pytest.raises(ValueError, match="3 requests are lost"):
            serve(Forgetful(BlockManager(8, 16), 2, 64, whole_prompt, preempt), [Request(0.0, [1], [2])] * 3)

    @pytest.mark.parametrize(
        ("table", "said"),
        [([], "has no block"), ([0], "not its own"), ([-1], "has no block"), ([9000], "has no block")],
    )
    def test_a_cache_that_says_yes_and_has_no_blocks(self, table: list[int], said: str) -> None:
        class Yes(BlockManager):
            def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
                seq.block_table[:] = table * -(-(seq.num_computed_tokens + num_new_tokens) // self.block_size)
                return True

        with pytest.raises(ValueError, match=said):
            scorer(COURSE.builder("m3"))(Yes)

    def test_a_prefix_that_nobody_computed(self) -> None:
        class Found(BlockManager):
            def get_computed_blocks(self, seq: Sequence) -> None:
                seq.num_computed_tokens = seq.num_tokens - 1

        with pytest.raises(ValueError, match="not its own, or not computed"):
            scorer(COURSE.builder("m5"))(Found)

    def test_nobody_says_how_long_an_answer_will_be(self) -> None:
        requests = load_trace("chat")
        told = [as_sequence(request) for request in requests]
        assert {seq.max_tokens for seq in told} == {MAX_TOKENS} and len({len(r.answer) for r in requests}) > 50
        assert all(request.answer[-1] not in request.answer[:-1] for request in requests), "only the last token ends it"


def test_medals() -> None:
    """Each reference has one, each gold is a target beyond the engine's own, and none is out of order."""
    builder = COURSE.builder("m2")
    worth = [builder.medal({"TTFT mean, ms": ms}) for ms in (701, 700, 600, 560)]
    assert worth == ["", "bronze", "silver", "gold"]
    assert replace(builder, target="x", medals=(1, 2, 3)).medal({"x": 2.5}) == "silver"


@pytest.mark.parametrize("builder", COURSE.builders, ids=lambda b: b.id)
def test_what_the_task_calls_a_medal(builder: Builder) -> None:
    """The numbers in the text are the manifest's, and the reference reaches silver."""
    score = builder.statement.partition("## The score")[2]
    assert [number in score for number in (f"{value:,}" for value in builder.medals)] == [True] * 3
    assert builder.medal(scorer(builder)(load_file(builder.reference, builder.symbol))) in ("silver", "gold")


def test_traces_are_what_the_tool_makes() -> None:
    assert {file.name: file.read_text("utf-8") for file in TRACES.glob("*.json")} == traces()
    for name in ("chat", "documents", "turns", "waves"):
        requests = load_trace(name)
        assert all(a.arrival <= b.arrival for a, b in pairwise(requests))
        assert max(len(request.prompt) + len(request.answer) for request in requests) <= SLOT, "one fits alone"


def test_the_second_turn_begins_with_the_first() -> None:
    requests = load_trace("turns")
    texts = [request.prompt + request.answer for request in requests]
    goes_on = [any(b.prompt[: len(a)] == a for a in texts[:i]) for i, b in enumerate(requests)]
    assert sum(goes_on) > 60, "conversations have several turns, each with all that was said before"


class TestCounting:
    def test_bytes(self) -> None:
        a, b = torch.zeros(8), torch.zeros(4)
        for work, expected in (
            (lambda: a[2:6], 0),  # a view
            (lambda: torch.cat((a, b)), 2 * 48),
            (lambda: a[2:6].copy_(b), 2 * 16),
            (lambda: a.new_empty(100), 0),
            (lambda: a.zero_(), 32),
        ):
            with CountBytes() as counted:
                work()
            assert counted.total == expected

    def test_a_cache_by_concatenation_copies_everything(self) -> None:
        """Prompt of 2 and one token after it: at least all K and V so far are read and written again."""
        model = ToyModel(num_layers=1)
        answer = CatLoop(model, 1, 8).answer([1, 2], lambda logits: 0)
        next(answer)
        before = model.moved.total
        next(answer)
        assert (model.num_tokens, model.num_pairs) == (3, 1 + 2 + 3)
        assert model.moved.total - before >= 2 * 3 * model.bytes_per_token

    def test_a_wrong_kernel_has_no_score(self) -> None:
        pytest.importorskip("triton", reason="Triton exists on Linux only")

        def zeros(*arguments: Any) -> torch.Tensor:
            return arguments[7].zero_()

        with pytest.raises(ValueError, match="result is wrong"):
            count_kernel(zeros, [16], [16])

    def test_what_a_kernel_moves(self) -> None:
        """Each query and result once, and K and V at least once: that is the least."""
        pytest.importorskip("triton", reason="Triton exists on Linux only")
        from folovllm.kernels.prefill import prefill

        score = count_kernel(prefill, [16], [16])
        assert score["of the least"] >= 1 and score["of those needed"] >= 1
        assert score["FLOPs"] == 2 * (2 * 4 * 32 * 32 * 32), "one tile of 32 by 32 for each of 4 heads, two products"


def test_yours_is_a_row(tmp_path: Path) -> None:
    builder = COURSE.builder("m3")
    mine = Mine(COURSE, tmp_path)
    mine.write(builder.path, builder.reference.read_text("utf-8"))
    rows = dict(scores(builder, mine))
    assert rows["yours"] == rows["the course's reference"] != rows["the engine's"]


def test_what_fails_its_tests_has_no_score(tmp_path: Path) -> None:
    builder = COURSE.builder("m3")
    text = builder.reference.read_text("utf-8").replace("// self.block_size)", "// self.block_size) + 1")
    Mine(COURSE, tmp_path).write(builder.path, text)
    with pytest.raises(ValueError, match=r"yours does not pass its tests.*python -m milestones test m3.builder"):
        scores(builder, Mine(COURSE, tmp_path))
