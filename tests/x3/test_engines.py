"""Drafts where an engine is short of room, is interrupted, or has two ranks."""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import pytest

from folovllm.electives.spec_decode import extension
from folovllm.electives.spec_decode import scheduler as speculative_scheduler
from folovllm.electives.spec_decode.proposer import RowState
from folovllm.engine.events import DraftsVerified, Event, StepEnded
from folovllm.engine.llm_engine import LLMEngine
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput
from folovllm.worker.warm_up import dummy_seqs
from tests.helpers import prompts
from tests.workloads import Request, assert_nothing_left, serve
from tests.x3.engines import Anything, Pair, make_engine, make_proposer, speculation_of, speculative

PLAIN = SamplingParams(temperature=0.8, seed=1, max_tokens=20, ignore_eos=True)
SMALL = {"block_size": 4, "num_kv_blocks": 34, "max_num_batched_tokens": 18, "max_num_seqs": 6}


def crowd() -> list[Request]:
    """Prompts that share their beginning, more than the pool holds."""
    head, *tails = prompts([9, 12, 3, 7, 16, 5, 1], seed=4)
    return [Request(head + tail, replace(PLAIN, seed=i, repetition_penalty=1.2)) for i, tail in enumerate(tails)]


@pytest.mark.parametrize("preset", ["m3", "m6"])
def test_sequences_give_way_and_come_back(preset: str) -> None:
    fields = {"milestone": preset, **SMALL} | ({"max_num_batched_tokens": None} if preset == "m3" else {})
    pair = Pair.of(crowd(), **fields)
    engine = pair.engine("often")
    for _ in range(1 if preset == "m3" else 2):  # the second time with all prefixes cached
        pair.check(serve(engine, pair.requests))
    assert engine.stats().preemptions > 0
    assert speculation_of(engine).num_accepted > 20
    if preset != "m3":
        assert engine.prefix_cache_stats().tokens_hit > 0


def test_an_answer_is_found_again_as_far_as_without_drafts() -> None:
    pair = Pair.of(crowd()[:1], milestone="m6", block_size=4)
    longer = [*pair.requests[0].prompt, *pair.plain[0].outputs[0].token_ids, 1]
    found = []
    for engine in (make_engine(**pair.fields), pair.engine("right"), pair.engine("often")):
        serve(engine, pair.requests)
        (output,) = serve(engine, [Request(longer, PLAIN)])
        found.append(output.num_cached_tokens)
    assert found == [len(longer) // 4 * 4 - 4 * (len(longer) % 4 == 1)] * 3


def test_what_is_aborted_disturbs_nobody() -> None:
    pair = Pair.of(crowd(), milestone="m6", block_size=4)
    engine = pair.engine("often")
    for i, request in enumerate(pair.requests):
        engine.add_request(f"{i}", request.prompt, request.params, stream=False)
    done: dict[str, Any] = {}
    for step in range(100):
        if step == 4:
            part = [engine.abort_request(name).outputs[0].token_ids for name in ("1", "4")]
        done |= {output.request_id: output for output in engine.step()}
        if not engine.has_unfinished_requests():
            break
    assert_nothing_left(engine)
    rest = [i for i in range(len(pair.requests)) if i not in (1, 4)]
    replace(pair, plain=[pair.plain[i] for i in rest]).check([done[f"{i}"] for i in rest])
    for i, tokens in zip((1, 4), part, strict=True):
        assert tokens == pair.plain[i].outputs[0].token_ids[: len(tokens)]


def test_fewer_steps_and_what_is_told_of_them() -> None:
    """With accepted drafts an answer of 21 tokens takes its prompt's step and five more of four tokens."""
    pair = Pair.of([Request(crowd()[0].prompt, replace(PLAIN, max_tokens=21))], milestone="m6")
    engine = pair.engine("right", k=3)
    told: list[Event] = []
    engine.subscribe(told.extend)
    engine.history = []
    pair.check(serve(engine, pair.requests))
    steps = [event for event in told if isinstance(event, StepEnded)]
    checked = [event for event in told if isinstance(event, DraftsVerified)]
    assert [len(step.result.token_ids[0]) for step in steps] == [1, 4, 4, 4, 4, 4]
    assert [(event.num_draft_tokens, event.num_accepted) for event in checked] == [(3, 3)] * 5
    assert [(step.num_prefill_tokens, step.num_decode_tokens) for step in engine.history] == [(21, 0)] + [(0, 4)] * 5


def test_only_what_comes_behind_drafts_waits() -> None:
    """A step starts before the one before it was taken in, unless that one has drafts."""
    (request,) = crowd()[:1]
    engine = make_engine(milestone="m6", **speculative(make_proposer("random", [], [])))
    flying = in_flight_at_each_start(engine, request)
    assert {count for count, behind_drafts in flying if behind_drafts} == {1}
    assert {count for count, behind_drafts in flying[1:] if not behind_drafts} == {2}, "no step waits for a draft"
    speculation_of(engine).policy.lengths = lambda seq_ids: [0] * len(seq_ids)
    assert set(in_flight_at_each_start(engine, request)[1:]) == {(2, False)}


def in_flight_at_each_start(engine: LLMEngine, request: Request) -> list[tuple[int, bool]]:
    """For each step how many are on the device when it has started, and whether the one before it had drafts."""
    engine.add_request("a", request.prompt, request.params)
    submit, flying, counts, had_drafts = engine.executor.submit, [0], [], [False]

    class Pending:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def wait(self) -> Any:
            flying[0] -= 1
            return self.inner.wait()

    def start(output: Any) -> Any:
        pending = submit(output)
        flying[0] += 1
        counts.append((flying[0], had_drafts[-1]))
        had_drafts.append(any(scheduled.num_samples > 1 for scheduled in output.scheduled_seqs))
        return Pending(pending)

    engine.executor.submit = start
    while engine.has_unfinished_requests():
        engine.step()
    engine.executor.submit = submit
    return counts


def test_a_step_samples_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are cut down to what a step may sample; a step that is made by hand and samples more is refused."""
    for place in (speculative_scheduler, extension):
        monkeypatch.setattr(place, "max_samples", lambda max_num_seqs: 9)
    pair = Pair.of(crowd(), milestone="m6", max_num_seqs=6)
    engine = pair.engine("right", k=5)
    told: list[Event] = []
    engine.subscribe(told.extend)
    pair.check(serve(engine, pair.requests))
    assert max(sum(s.num_samples for s in e.output.scheduled_seqs) for e in told if isinstance(e, StepEnded)) == 9
    (scheduled,) = dummy_seqs([16], 16)
    with pytest.raises(RuntimeError, match="a step samples 16 tokens, and there is room for 15"):
        engine.executor.execute_model(SchedulerOutput((scheduled._replace(num_samples=16),)))


@pytest.mark.parametrize("milestone", ["m5", "m6"])
def test_requests_beside_as_many_drafts_as_there_can_be(milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each samples too, in the step that admits it: there is room for all of them."""
    for place in (speculative_scheduler, extension):
        monkeypatch.setattr(place, "max_samples", lambda max_num_seqs: 9)
    pair = Pair.of(crowd(), milestone=milestone, max_num_seqs=6)
    engine, told = pair.engine("right", k=5), list[Event]()
    engine.subscribe(told.extend)
    for i, request in enumerate(pair.requests[:6]):
        engine.add_request(str(i), request.prompt, request.params)
        for _ in range(4 * (i == 1)):
            engine.step()
    for _ in range(4):
        engine.step()
    assert max(sum(s.num_samples for s in e.output.scheduled_seqs) for e in told if isinstance(e, StepEnded)) > 9


def test_a_proposer_knows_each_salt() -> None:
    """What it learns from a request may serve those of the same salt alone."""
    salts: dict[int, str | None] = {}

    class Listening(Anything):
        def propose(self, state: RowState, k: int) -> SequenceOf[int]:
            salts[state.num_prompt_tokens] = state.cache_salt
            return []

    engine = make_engine(milestone="m3", **speculative(Listening()))
    engine.add_request("1", {"prompt_token_ids": [5, 6, 7], "cache_salt": "s"}, replace(PLAIN, max_tokens=4))
    engine.add_request("2", [5, 6], replace(PLAIN, max_tokens=4))
    while engine.has_unfinished_requests():
        engine.step()
    assert salts == {3: "s", 2: None}
