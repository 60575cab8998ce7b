"""Exercises m2.2 and m2.3: who takes part in a step, and what becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from folovllm.engine.scheduler import Scheduler, TokensOfStep, wait, whole_prompt
from folovllm.request import Sequence, SequenceStatus
from folovllm.step.schedule import SchedulerOutput
from tests.sequences import EOS, CountingCache, make_seq
from tests.tiny import worked_case

Shares = list[tuple[str, int, int]]


def make_scheduler(cache: CountingCache | None = None, **changed: Any) -> Scheduler:
    options: dict[str, Any] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 100, "tokens_of_step": whole_prompt, "make_room": wait
    }  # fmt: skip
    return Scheduler(cache or CountingCache(), **options | changed)


def queue(scheduler: Scheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        scheduler.add(seq)


def run(scheduler: Scheduler, name: str, num_tokens: int, num_computed: int, **options: Any) -> Sequence:
    """A sequence that is running already, with cache for its computed tokens."""
    seq = make_seq(num_tokens, name=name, **options)
    assert scheduler.kv.reserve(seq, num_computed)
    seq.status, seq.num_computed_tokens = SequenceStatus.RUNNING, num_computed
    scheduler.running.append(seq)
    return seq


def decide(scheduler: Scheduler) -> Shares:
    """The next step: (request, first token, number of tokens), in order."""
    return shares(scheduler, scheduler.schedule())


def shares(scheduler: Scheduler, output: SchedulerOutput) -> Shares:
    pairs = zip(scheduler.sequences(output), output.shares, strict=True)
    return [(seq.request_id, share.start, share.num_new_tokens) for seq, share in pairs]


def names(seqs: Any) -> list[str]:
    return [seq.request_id for seq in seqs]


class WatchedCache(CountingCache):
    """Also notes the status with which a sequence came to ask for room."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_as: dict[str, str] = {}

    def reserve(self, seq: Sequence, num_new_tokens: int) -> bool:
        self.asked_as[seq.request_id] = seq.status.value
        return super().reserve(seq, num_new_tokens)


class TestSchedule:
    def test_a_worked_case(self) -> None:
        """A budget of 10. One decodes; a (4 tokens), long (8, of which 2 are cached) and short (1) wait."""
        cache = WatchedCache()
        cache.cached = {"long": 2}
        scheduler = make_scheduler(cache, max_num_batched_tokens=10)
        run(scheduler, "old", 9, 8)
        cache.asked_as.clear()
        queue(scheduler, make_seq(4, name="a"), make_seq(8, name="long"), make_seq(1, name="short"))
        got = {
            "shares": shares(scheduler.schedule()),
            "waiting": names(scheduler.waiting),
            "who holds cache": names(cache.held),
            "status of each when its cache was asked for": cache.asked_as,
        }
        answers = [[("old", 8, 1), ("a", 0, 4)], ["long", "short"], ["old", "a"], {"old": "running", "a": "waiting"}]
        says = "10 - 1 - 4 = 5 tokens are left, long needs 6: it waits with nothing in its hands, and short behind it"
        worked_case("m2.2", got, dict(zip(got, answers, strict=True)), says)

    def test_a_worked_case_without_room(self) -> None:
        """a, b and c fill the cache and need one token each: a gives way, which leaves room for b, c and 2 more."""

        def first_gives_way(scheduler: Scheduler, candidates: list[Sequence]) -> Sequence:
            scheduler.running.remove(candidates[0])
            scheduler.kv.free(candidates[0])
            return candidates[0]

        scheduler = make_scheduler(CountingCache(12), make_room=first_gives_way)
        for name in "abc":
            run(scheduler, name, 5, 4)
        queue(scheduler, make_seq(1, name="new"))
        output = scheduler.schedule()
        got = {"shares": shares(output), "preempted": names(output.preempted), "waiting": names(scheduler.waiting)}
        expected = {"shares": [("b", 4, 1), ("c", 4, 1)], "preempted": ["a"], "waiting": ["new"]}
        says = "who gets no room does not stop those behind it; after a preemption nobody is admitted"
        worked_case("m2.2 no room", got, expected, says)

    def test_nothing_to_do(self) -> None:
        output = make_scheduler().schedule()
        assert output == SchedulerOutput()

    def test_a_whole_prompt_then_a_token_a_step(self) -> None:
        scheduler, seq = make_scheduler(), make_seq(5, name="a")
        queue(scheduler, seq)
        output = scheduler.schedule()
        assert shares(scheduler, output) == [("a", 0, 5)] and output.shares[0].num_draws == 1
        assert seq.status is SequenceStatus.RUNNING and seq.num_computed_tokens == 5
        assert names(scheduler.running) == ["a"] and not scheduler.waiting
        for n in range(5, 8):
            seq.append_token(7)
            assert decide(scheduler) == [("a", n, 1)]

    def test_new_ones_join_those_that_run(self) -> None:
        scheduler = make_scheduler()
        run(scheduler, "old", 9, 8)
        queue(scheduler, make_seq(3, name="a"), make_seq(4, name="b"))
        assert decide(scheduler) == [("old", 8, 1), ("a", 0, 3), ("b", 0, 4)]
        assert names(scheduler.running) == ["old", "a", "b"]

    def test_decodes_before_the_rest(self) -> None:
        scheduler = make_scheduler()
        run(scheduler, "long", 9, 2)
        run(scheduler, "decode1", 5, 4)
        run(scheduler, "long2", 9, 3)
        run(scheduler, "decode2", 8, 7)
        expected = [("decode1", 4, 1), ("decode2", 7, 1), ("long", 2, 7), ("long2", 3, 6)]
        assert decide(scheduler) == expected

    def test_at_most_max_num_seqs(self) -> None:
        scheduler = make_scheduler(max_num_seqs=3)
        run(scheduler, "old", 9, 8)
        queue(scheduler, *(make_seq(2, name=name) for name in "abcd"))
        assert [name for name, *_ in decide(scheduler)] == ["old", "a", "b"]
        assert names(scheduler.waiting) == ["c", "d"] and len(scheduler.running) == 3

    def test_the_budget_counts_tokens(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10)
        run(scheduler, "old", 9, 8)
        queue(scheduler, make_seq(4, name="a"), make_seq(5, name="b"), make_seq(1, name="c"))
        output = scheduler.schedule()
        assert shares(scheduler, output) == [("old", 8, 1), ("a", 0, 4), ("b", 0, 5)] and output.num_tokens == 10
        assert names(scheduler.waiting) == ["c"]

    def test_nobody_overtakes_when_the_budget_is_short(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10)
        queue(scheduler, make_seq(4, name="a"), make_seq(7, name="long"), make_seq(1, name="short"))
        assert decide(scheduler) == [("a", 0, 4)]
        assert names(scheduler.waiting) == ["long", "short"]
        assert all(seq.status is SequenceStatus.WAITING and seq.num_computed_tokens == 0 for seq in scheduler.waiting)

    def test_nobody_overtakes_when_the_cache_is_full(self) -> None:
        cache = CountingCache(10)
        scheduler = make_scheduler(cache)
        queue(scheduler, make_seq(4, name="a"), make_seq(7, name="long"), make_seq(1, name="short"))
        assert decide(scheduler) == [("a", 0, 4)]
        assert names(scheduler.waiting) == ["long", "short"] and cache.num_free == 6
        assert all(seq.status is SequenceStatus.WAITING for seq in scheduler.waiting)
        assert ("reserve", "short") not in cache.calls

    def test_the_cache_is_asked_what_it_has(self) -> None:
        """`match` comes before the number of tokens is known: what is cached need not be computed."""
        cache = CountingCache()
        cache.cached = {"a": 4}
        scheduler = make_scheduler(cache, max_num_batched_tokens=5)
        queue(scheduler, make_seq(9, name="a"))
        assert decide(scheduler) == [("a", 4, 5)]
        assert cache.calls == [("match", "a"), ("reserve", "a")]

    @pytest.mark.parametrize("short_of", ["budget", "cache"])
    def test_who_has_to_wait_gives_back_what_it_matched(self, short_of: str) -> None:
        cache = CountingCache(8 if short_of == "cache" else 1000)
        cache.cached = {"a": 4}
        scheduler = make_scheduler(cache, max_num_batched_tokens=3 if short_of == "budget" else 100)
        queue(scheduler, make_seq(9, name="a"))
        assert decide(scheduler) == [] and names(scheduler.waiting) == ["a"]
        assert cache.calls[-1] == ("free", "a") and not cache.held

    def test_tokens_of_step_decides_how_many(self) -> None:
        scheduler = make_scheduler(tokens_of_step=lambda seq, budget: min(seq.num_uncomputed_tokens, budget, 3))
        scheduler._max_num_batched_tokens = 5
        queue(scheduler, make_seq(7, name="a"), make_seq(7, name="b"))
        first = scheduler.schedule()
        assert shares(scheduler, first) == [("a", 0, 3), ("b", 0, 2)] and not any(
            share.num_draws for share in first.shares
        )
        assert decide(scheduler) == [("a", 3, 3), ("b", 2, 2)]
        last = scheduler.schedule()
        assert shares(scheduler, last) == [("a", 6, 1), ("b", 4, 3)] and [share.num_draws for share in last.shares] == [
            1,
            1,
        ]

    def test_a_budget_used_up_by_those_that_run(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=2)
        for name in "abc":
            run(scheduler, name, 5, 4)
        queue(scheduler, make_seq(1, name="new"))
        assert decide(scheduler) == [("a", 4, 1), ("b", 4, 1)]
        assert names(scheduler.running) == ["a", "b", "c"] and names(scheduler.waiting) == ["new"]

    def test_no_room_for_one_that_runs(self) -> None:
        """With `wait` it is left out of this step, and stays."""
        cache = CountingCache(9)
        scheduler = make_scheduler(cache)
        seqs = [run(scheduler, name, 5, 4) for name in "ab"]
        assert decide(scheduler) == [("a", 4, 1)]
        assert names(scheduler.running) == ["a", "b"] and seqs[1].num_computed_tokens == 4

    def test_who_gets_no_room_does_not_stop_the_rest(self) -> None:
        """The one that needs room gives way itself; those behind it can use what it held."""

        def asker_gives_way(scheduler: Scheduler, candidates: list[Sequence]) -> Sequence:
            victim = next(seq for seq in candidates if seq.request_id == "a")
            scheduler.running.remove(victim)
            scheduler.kv.free(victim)
            victim.requeue()
            return victim

        scheduler = make_scheduler(CountingCache(12), make_room=asker_gives_way)
        a, *_ = (run(scheduler, name, 5, 4) for name in "abc")
        output = scheduler.schedule()
        assert shares(scheduler, output) == [("b", 4, 1), ("c", 4, 1)] and output.preempted == (a.seq_id,)

    def test_after_a_preemption_nobody_is_admitted(self) -> None:
        """The room that a victim left is for those who run; whoever came in now would be the next victim."""
        asked: list[list[str]] = []

        def last_gives_way(scheduler: Scheduler, candidates: list[Sequence]) -> Sequence:
            asked.append(names(candidates))
            victim = candidates[-1]
            scheduler.running.remove(victim)
            scheduler.kv.free(victim)
            victim.status, victim.num_computed_tokens = SequenceStatus.WAITING, 0
            scheduler.add(victim)
            return victim

        scheduler = make_scheduler(CountingCache(12), make_room=last_gives_way, by_priority=True)
        *_, c = (run(scheduler, name, 5, 4) for name in "abc")
        queue(scheduler, make_seq(1, name="urgent", priority=-1))  # fits into what is left, and waits all the same
        output = scheduler.schedule()
        assert shares(scheduler, output) == [("a", 4, 1), ("b", 4, 1)] and output.preempted == (c.seq_id,)
        assert asked == [["a", "b", "c"]]
        assert names(scheduler.waiting) == ["urgent", "c"] and names(scheduler.running) == ["a", "b"]


class TestPostprocess:
    def compute(self, *counts: tuple[Sequence, int]) -> None:
        """As if a step had computed so many tokens of each."""
        for seq, count in counts:
            seq.num_computed_tokens += count

    def test_a_worked_case(self) -> None:
        """The step's order is c, a, b; a's share does not reach its last token, so its row (72) means nothing."""
        cache = CountingCache()
        scheduler = make_scheduler(cache)
        a, b, c = run(scheduler, "a", 9, 0), run(scheduler, "b", 3, 2), run(scheduler, "c", 4, 3)
        updated = scheduler.postprocess(self.step(scheduler, (c, 1), (a, 4), (b, 1)), [71, 72, EOS])
        got = {
            "updated": names(updated),
            "answers of a, b, c": [seq.output_token_ids for seq in (a, b, c)],
            "status of a, b, c": [seq.status.value for seq in (a, b, c)],
            "running": names(scheduler.running),
            "who holds cache": names(cache.held),
        }
        answers = [["c", "b"], [[], [EOS], [71]], ["running", "stop", "running"], ["a", "c"], ["a", "c"]]
        says = "rows 71, 72, EOS belong to c, a, b in this order; b ends, and leaves the batch and the cache at once"
        worked_case("m2.3", got, dict(zip(got, answers, strict=True)), says)

    def test_a_token_each(self) -> None:
        scheduler = make_scheduler()
        a, b = run(scheduler, "a", 4, 0), run(scheduler, "b", 6, 5)
        self.compute((b, 1), (a, 4))
        updated = scheduler.postprocess([(b, [71]), (a, [72])])
        assert names(updated) == ["b", "a"]
        assert a.token_ids[-1] == 72 and b.token_ids[-1] == 71 and (a.num_tokens, b.num_tokens) == (5, 7)
        assert (a.detokenizer.token_ids, b.detokenizer.token_ids) == ([72], [71])
        assert a.num_uncomputed_tokens == b.num_uncomputed_tokens == 1
        assert names(scheduler.running) == ["a", "b"]

    def test_a_share_that_does_not_reach_the_end_has_no_token(self) -> None:
        scheduler = make_scheduler()
        a, b = run(scheduler, "a", 9, 0), run(scheduler, "b", 3, 2)
        self.compute((b, 1), (a, 4))
        updated = scheduler.postprocess([(a, []), (b, [71])])
        assert names(updated) == ["b"]
        assert a.num_tokens == 9 and a.detokenizer.token_ids == [] and a.status is SequenceStatus.RUNNING

    def test_several_tokens_at_once(self) -> None:
        """As speculation brings them. What comes after the end of an answer is dropped."""
        scheduler = make_scheduler()
        a, b = run(scheduler, "a", 4, 3), run(scheduler, "b", 4, 3)
        updated = scheduler.postprocess([(a, [71, 72]), (b, [73, EOS, 74])])
        assert names(updated) == ["a", "b"] and names(scheduler.running) == ["a"]
        assert a.output_token_ids.tolist() == [71, 72] and b.output_token_ids.tolist() == [73, EOS]

    def test_who_ends_leaves_at_once(self) -> None:
        cache = CountingCache()
        scheduler = make_scheduler(cache)
        stops, goes_on, full = (run(scheduler, n, 4, 3, max_tokens=m) for n, m in (("s", 9), ("g", 9), ("f", 1)))
        cache.calls.clear()
        updated = scheduler.postprocess([(stops, [EOS]), (goes_on, [71]), (full, [72])])
        assert names(updated) == ["s", "g", "f"]
        assert stops.status is SequenceStatus.FINISHED_STOPPED and full.status is SequenceStatus.FINISHED_LENGTH
        assert goes_on.status is SequenceStatus.RUNNING and names(scheduler.running) == ["g"]
        assert [call for call in cache.calls if call[0] == "free"] == [("free", "s"), ("free", "f")]
        assert list(cache.held) == [goes_on]

    def test_all_end_together(self) -> None:
        scheduler = make_scheduler()
        seqs = [run(scheduler, name, 4, 3) for name in "abc"]
        scheduler.postprocess([(seq, [EOS]) for seq in seqs])
        assert scheduler.running == [] and all(seq.status.is_finished for seq in seqs)

    def test_the_cache_hears_what_was_written(self) -> None:
        """`publish` speaks of computed tokens: the new token has no K/V yet. Partial shares are published too."""
        cache = CountingCache()
        scheduler = make_scheduler(cache)
        a, b = run(scheduler, "a", 9, 0), run(scheduler, "b", 3, 2)
        cache.calls.clear()
        scheduler.postprocess([(b, [71]), (a, [])])
        assert cache.calls == [("publish", "b with 3 tokens"), ("publish", "a with 9 tokens")]

    def test_a_stop_string(self) -> None:
        scheduler = make_scheduler()
        seq = run(scheduler, "a", 3, 2, stop=["<72>"])
        for token in (71, 72):
            scheduler.postprocess([(seq, [token])])
        assert seq.status is SequenceStatus.FINISHED_STOPPED and seq.stop_reason == "<72>"
        assert seq.detokenizer.text == "<71>"


def test_priorities_decide_the_order_of_waiting() -> None:
    seqs = [make_seq(name=name, priority=p) for name, p in (("a", 2), ("b", 0), ("c", 2), ("d", 1))]
    for by_priority, expected in ((False, "abcd"), (True, "bdac")):
        scheduler: Scheduler = make_scheduler(by_priority=by_priority)
        queue(scheduler, *seqs)
        assert names(scheduler.waiting) == list(expected)


def test_abort_wherever_it_is() -> None:
    cache = CountingCache()
    scheduler = make_scheduler(cache)
    running, waiting = run(scheduler, "r", 4, 3), make_seq(name="w")
    queue(scheduler, waiting)
    for seq in (running, waiting):
        scheduler.abort(seq)
        assert seq.status is SequenceStatus.FINISHED_ABORTED
    assert not scheduler.running and not scheduler.waiting and not cache.held


def test_abort_of_several_leaves_the_others_in_order() -> None:
    cache = CountingCache()
    scheduler = make_scheduler(cache)
    running = [run(scheduler, name, 4, 3) for name in "abc"]
    waiting = [make_seq(name=name) for name in "wxyz"]
    queue(scheduler, *waiting)
    scheduler.abort(waiting[1], running[0], waiting[3], running[2])
    assert names(scheduler.running) == ["b"] and names(scheduler.waiting) == ["w", "y"]
    assert set(cache.held) == {running[1]}
    scheduler.abort()
    assert names(scheduler.waiting) == ["w", "y"]


def test_whole_prompt_or_nothing() -> None:
    tokens: TokensOfStep = whole_prompt
    assert [tokens(make_seq(5), budget) for budget in (4, 5, 6)] == [0, 5, 5]
