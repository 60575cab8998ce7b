"""Exercises m2.2 and m2.3: who takes part in a step, and what becomes of it."""

from typing import Any

import pytest

from folovllm.engine.scheduler import OnFull, Scheduler, TokensOfStep, wait, whole_prompt
from folovllm.request import Sequence, SequenceStatus
from folovllm.step.schedule import SchedulerOutput
from tests.sequences import EOS, CountingCache, make_seq
from tests.tiny import worked_case

Shares = list[tuple[str, int, int]]


def make_scheduler(cache: CountingCache | None = None, **changed: Any) -> Scheduler:
    options: dict[str, Any] = {
        "max_num_seqs": 4, "max_num_batched_tokens": 100, "tokens_of_step": whole_prompt, "on_full": wait
    }  # fmt: skip
    return Scheduler(cache or CountingCache(), **options | changed)


def queue(scheduler: Scheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        scheduler.add(seq)


def run(scheduler: Scheduler, name: str, num_tokens: int, num_computed: int, **options: Any) -> Sequence:
    """A sequence that is running already, with cache for its computed tokens."""
    seq = make_seq(num_tokens, name=name, **options)
    assert scheduler.kv.allocate_slots(seq, num_computed)
    seq.status, seq.num_computed_tokens = SequenceStatus.RUNNING, num_computed
    scheduler.running.append(seq)
    return seq


def decide(scheduler: Scheduler) -> Shares:
    """The next step: (request, first token, number of tokens), in order."""
    return scheduled_seqs(scheduler, scheduler.schedule())


def scheduled_seqs(scheduler: Scheduler, output: SchedulerOutput) -> Shares:
    pairs = zip(scheduler.sequences(output), output.scheduled_seqs, strict=True)
    return [(seq.request_id, scheduled.start, scheduled.num_new_tokens) for seq, scheduled in pairs]


def names(seqs: Any) -> list[str]:
    return [seq.request_id for seq in seqs]


def said(outputs: Any) -> list[tuple[str, list[int], str | None]]:
    """What was returned: (request, new tokens, how it ended)."""
    return [(seq.request_id, list(ids), None if status is None else status.value) for seq, ids, status in outputs]


class WatchedCache(CountingCache):
    """Also notes the status with which a sequence came to ask for room."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_as: dict[str, str] = {}

    def allocate_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        self.asked_as[seq.request_id] = seq.status.value
        return super().allocate_slots(seq, num_new_tokens)


def gives_way(name: str) -> OnFull:
    """The sequence of that name gives way as long as it runs, and nobody else ever does."""

    def on_full(scheduler: Scheduler, running: list[Sequence]) -> Sequence | None:
        victim = next((seq for seq in running if seq.request_id == name), None)
        if victim is not None:
            scheduler.running.remove(victim)
            scheduler.kv.free(victim)
            victim.status, victim.num_computed_tokens = SequenceStatus.WAITING, 0
            scheduler.add(victim)
        return victim

    return on_full


class TestSchedule:
    def test_a_worked_case(self) -> None:
        """A budget of 12. Of part 4 tokens are not computed, old decodes; a (2), b (3), long (8, 2 of them cached) and short (1) wait."""
        cache = WatchedCache()
        cache.cached = {"long": 2}
        scheduler = make_scheduler(cache, max_num_batched_tokens=12, max_num_seqs=8)
        run(scheduler, "part", 9, 5)
        run(scheduler, "old", 9, 8)
        cache.asked_as.clear()
        queue(scheduler, *(make_seq(n, name=name) for name, n in (("a", 2), ("b", 3), ("long", 8), ("short", 1))))
        got = {
            "shares": decide(scheduler),
            "waiting": names(scheduler.waiting),
            "running": names(scheduler.running),
            "who holds cache": names(cache.held),
            "status of each when its cache was asked for": cache.asked_as,
        }
        answers = [
            [("old", 8, 1), ("part", 5, 4), ("a", 0, 2), ("b", 0, 3)],
            ["long", "short"],
            ["part", "old", "a", "b"],
            ["part", "old", "a", "b"],
            {"old": "running", "part": "running", "a": "waiting", "b": "waiting"},
        ]
        says = "12 - 1 - 4 - 2 - 3 = 2 tokens are left, long needs 6: it waits, and short waits behind it"
        worked_case("m2.2", got, dict(zip(got, answers, strict=True)), says)

    def test_a_worked_case_without_room(self) -> None:
        """a, b and c fill the cache and need one token each: a gives way, which leaves room for b, c and 2 more."""
        scheduler = make_scheduler(CountingCache(12), on_full=gives_way("a"))
        seqs = [run(scheduler, name, 5, 4) for name in "abc"]
        queue(scheduler, make_seq(1, name="new"))
        output = scheduler.schedule()
        got = {
            "shares": scheduled_seqs(scheduler, output),
            "preempted": [seq.request_id for seq in seqs if seq.seq_id in output.preempted],
            "waiting": names(scheduler.waiting),
        }
        expected = {"shares": [("b", 4, 1), ("c", 4, 1)], "preempted": ["a"], "waiting": ["a", "new"]}
        says = "who gets no room does not stop those behind it; after a preemption nobody is admitted"
        worked_case("m2.2 no room", got, expected, says)

    def test_a_worked_case_of_a_share_that_is_taken_back(self) -> None:
        """A budget of 2 and room for one token more. v decodes, takes both, and gives way when a needs room."""
        scheduler = make_scheduler(CountingCache(17), max_num_batched_tokens=2, on_full=gives_way("v"))
        seqs = [run(scheduler, name, 5, 4) for name in "vabc"]
        output = scheduler.schedule()
        got = {
            "shares": scheduled_seqs(scheduler, output),
            "preempted": [seq.request_id for seq in seqs if seq.seq_id in output.preempted],
            "computed tokens of v, a, b, c": [seq.num_computed_tokens for seq in seqs],
        }
        expected = {"shares": [("a", 4, 1), ("b", 4, 1)], "preempted": ["v"]}
        expected["computed tokens of v, a, b, c"] = [0, 5, 5, 4]
        says = "v leaves the step and gives its token of the budget back: a and b have one each, none is left for c"
        worked_case("m2.2 taken back", got, expected, says)

    def test_nothing_to_do(self) -> None:
        output = make_scheduler().schedule()
        assert output == SchedulerOutput(), "without sequences a step has no shares"

    def test_a_whole_prompt_then_a_token_a_step(self) -> None:
        scheduler, seq = make_scheduler(), make_seq(5, name="a")
        queue(scheduler, seq)
        output = scheduler.schedule()
        assert scheduled_seqs(scheduler, output) == [("a", 0, 5)], "a prompt of 5 tokens is computed in one step"
        assert output.scheduled_seqs[0].num_samples == 1, "it reaches the last token, so the next one is drawn"
        assert seq.status is SequenceStatus.RUNNING, "who takes part has been started"
        assert seq.num_computed_tokens == 5, "`builder.add` counts the tokens of a share as computed, once"
        assert names(scheduler.running) == ["a"] and not scheduler.waiting, "it has left `waiting` and runs"
        for n in range(5, 8):
            seq.append_token(7)
            assert decide(scheduler) == [("a", n, 1)], "each step computes the token that the one before it drew"

    def test_decodes_before_the_rest(self) -> None:
        scheduler = make_scheduler()
        run(scheduler, "long", 9, 2)
        run(scheduler, "decode1", 5, 4)
        run(scheduler, "long2", 9, 3)
        run(scheduler, "decode2", 8, 7)
        expected = [("decode1", 4, 1), ("decode2", 7, 1), ("long", 2, 7), ("long2", 3, 6)]
        assert decide(scheduler) == expected, "first those with one uncomputed token; both groups keep their order"

    def test_at_most_max_num_seqs(self) -> None:
        scheduler = make_scheduler(max_num_seqs=3)
        run(scheduler, "old", 9, 8)
        queue(scheduler, *(make_seq(2, name=name) for name in "abcd"))
        assert [name for name, *_ in decide(scheduler)] == ["old", "a", "b"], "three places, and old has one of them"
        assert names(scheduler.waiting) == ["c", "d"], "c and d wait for a place"
        assert len(scheduler.running) == 3, "never more than `max_num_seqs` run"

    def test_the_budget_counts_tokens(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=10)
        run(scheduler, "old", 9, 8)
        queue(scheduler, make_seq(4, name="a"), make_seq(5, name="b"), make_seq(1, name="c"))
        output = scheduler.schedule()
        assert scheduled_seqs(scheduler, output) == [("old", 8, 1), ("a", 0, 4), ("b", 0, 5)], "1 + 4 + 5 tokens are 10"
        assert output.num_tokens == 10, "the budget can be used to its last token"
        assert names(scheduler.waiting) == ["c"], "nothing is left for c"

    def test_nobody_overtakes_when_the_cache_is_full(self) -> None:
        cache = CountingCache(10)
        scheduler = make_scheduler(cache)
        queue(scheduler, make_seq(4, name="a"), make_seq(7, name="long"), make_seq(1, name="short"))
        assert decide(scheduler) == [("a", 0, 4)], "there is room for 6 tokens, long needs 7, and short may not pass it"
        assert names(scheduler.waiting) == ["long", "short"], "both wait, in their order"
        assert cache.num_free == 6, "who waits holds no cache"
        assert all(seq.status is SequenceStatus.WAITING for seq in scheduler.waiting), "who waits was not started"
        assert ("allocate_slots", "short") not in cache.calls, "the first that does not fit ends the search"

    def test_the_cache_is_asked_what_it_has(self) -> None:
        """What is cached need not be computed."""
        cache = CountingCache()
        cache.cached = {"a": 4}
        scheduler = make_scheduler(cache, max_num_batched_tokens=5)
        queue(scheduler, make_seq(9, name="a"))
        assert decide(scheduler) == [("a", 4, 5)], "4 of its 9 tokens are cached; the other 5 are its share"
        says = "`_admit` asks for what is cached and for room, once"
        assert cache.calls == [("get_computed_blocks", "a"), ("allocate_slots", "a")], says

    @pytest.mark.parametrize("short_of", ["budget", "cache"])
    def test_who_has_to_wait_gives_back_what_it_matched(self, short_of: str) -> None:
        cache = CountingCache(8 if short_of == "cache" else 1000)
        cache.cached = {"a": 4}
        scheduler = make_scheduler(cache, max_num_batched_tokens=3 if short_of == "budget" else 100)
        queue(scheduler, make_seq(9, name="a"))
        assert decide(scheduler) == [] and names(scheduler.waiting) == ["a"], f"a waits: the {short_of} is too small"
        assert cache.calls[-1] == ("free", "a") and not cache.held, "what was cached of it is not held while it waits"

    def test_tokens_of_step_decides_how_many(self) -> None:
        scheduler = make_scheduler(tokens_of_step=lambda seq, budget: min(seq.num_uncomputed_tokens, budget, 3))
        scheduler._max_num_batched_tokens = 5
        queue(scheduler, make_seq(7, name="a"), make_seq(7, name="b"))
        for expected, draws in (
            ([("a", 0, 3), ("b", 0, 2)], [0, 0]),
            ([("a", 3, 3), ("b", 2, 2)], [0, 0]),
            ([("a", 6, 1), ("b", 4, 3)], [1, 1]),
        ):
            output = scheduler.schedule()
            assert scheduled_seqs(scheduler, output) == expected, "at most 3 of each and 5 in all"
            assert [scheduled.num_samples for scheduled in output.scheduled_seqs] == draws, "the last share alone draws"

    def test_no_room_for_one_that_runs(self) -> None:
        """With `wait` it is left out of this step, and stays."""
        scheduler = make_scheduler(CountingCache(9))
        seqs = [run(scheduler, name, 5, 4) for name in "ab"]
        assert decide(scheduler) == [("a", 4, 1)], "there is room for one token more, which a takes"
        assert names(scheduler.running) == ["a", "b"], "b gets nothing in this step, and runs on"
        assert seqs[1].num_computed_tokens == 4, "what has no share is not computed"

    def test_a_victim_that_had_its_share_leaves_the_step_and_gives_its_budget_back(self) -> None:
        """v is asked first and gets 3 of 4 tokens; then the cache is full, and v gives way to what comes behind it."""
        scheduler = make_scheduler(CountingCache(12), max_num_batched_tokens=4, on_full=gives_way("v"))
        v, a = run(scheduler, "v", 9, 6), run(scheduler, "a", 6, 3)
        scheduler._tokens_of_step = lambda seq, budget: min(seq.num_uncomputed_tokens, budget, 3)
        output = scheduler.schedule()
        assert scheduled_seqs(scheduler, output) == [("a", 3, 1)], "v has no part in the step any more"
        assert output.preempted == (v.seq_id,) and output.num_tokens == 1, "its tokens are not computed"
        assert (v.status, v.num_computed_tokens) == (SequenceStatus.WAITING, 0), "v waits, with nothing computed"
        assert list(scheduler.kv.held) == [a], "v holds no cache"
        assert decide(scheduler) == [("a", 4, 2), ("v", 0, 2)], "its 3 tokens and its place are given to the next step"

    def test_after_a_preemption_nobody_is_admitted(self) -> None:
        """The room that a victim left is for those who run; whoever came in now would be the next victim."""
        asked: list[list[str]] = []

        def on_full(scheduler: Scheduler, running: list[Sequence]) -> Sequence | None:
            asked.append(names(running))
            return gives_way("c")(scheduler, running)

        scheduler = make_scheduler(CountingCache(12), on_full=on_full, by_priority=True)
        *_, c = (run(scheduler, name, 5, 4) for name in "abc")
        queue(scheduler, make_seq(1, name="urgent", priority=-1))  # fits into what is left, and waits all the same
        output = scheduler.schedule()
        assert scheduled_seqs(scheduler, output) == [("a", 4, 1), ("b", 4, 1)], "c gives way, and b has room"
        assert output.preempted == (c.seq_id,), "one victim is enough"
        assert asked == [["a", "b", "c"]], "anybody who runs may give way, whether it has a share already or not"
        assert names(scheduler.waiting) == ["urgent", "c"], "nobody comes in, not even who is more urgent"
        assert names(scheduler.running) == ["a", "b"], "c runs no more"


class TestPostprocess:
    def compute(self, *counts: tuple[Sequence, int]) -> None:
        """As if a step had computed so many tokens of each."""
        for seq, count in counts:
            seq.num_computed_tokens += count

    def test_a_worked_case(self) -> None:
        """The step's order is d, c, a, b. Of a, which is long, only a piece was computed; d and b draw their last token."""
        cache = CountingCache()
        scheduler = make_scheduler(cache)
        seqs = a, b, c, d = [run(scheduler, *own) for own in (("a", 9, 0), ("b", 3, 2), ("c", 4, 3), ("d", 5, 4))]
        self.compute((a, 4), (b, 1), (c, 1), (d, 1))
        cache.calls.clear()
        outputs = scheduler.postprocess([(d, [EOS]), (c, [70]), (a, []), (b, [71, EOS, 72])])
        got = {
            "returned": said(outputs),
            "answers of a, b, c, d": [seq.output_token_ids for seq in seqs],
            "status of a, b, c, d": [seq.status.value for seq in seqs],
            "running": names(scheduler.running),
            "who holds cache": names(cache.held),
            "published": [says for call, says in cache.calls if call == "cache_blocks"],
        }
        answers = [
            [("d", [EOS], "stop"), ("c", [70], None), ("b", [71, EOS], "stop")],
            [[], [71, EOS], [70], [EOS]],
            ["running", "stop", "running", "stop"],
            ["a", "c"],
            ["a", "c"],
            [f"{name} with {n} tokens" for name, n in (("d", 5), ("c", 4), ("a", 9), ("b", 3))],
        ]
        says = "d and b end, and leave the batch and the cache at once; what b drew after its EOS (72) is dropped"
        worked_case("m2.3", got, dict(zip(got, answers, strict=True)), says)

    def test_several_tokens_at_once(self) -> None:
        """As speculation brings them. What comes after the end of an answer is dropped."""
        scheduler = make_scheduler()
        a, b = run(scheduler, "a", 4, 3), run(scheduler, "b", 4, 3)
        outputs = scheduler.postprocess([(a, [71, 72]), (b, [73, EOS, 74])])
        says = "each sequence once, with all tokens that joined its answer and no other"
        assert said(outputs) == [("a", [71, 72], None), ("b", [73, EOS], "stop")], says
        assert names(scheduler.running) == ["a"], "b ended in the middle of its list"
        assert a.output_token_ids.tolist() == [71, 72], "all of a list belongs to the answer, in its order"
        assert b.output_token_ids.tolist() == [73, EOS], "what follows the end of an answer is no part of it"
        says = "the detokenizer gets each token before the question whether it ends the answer, and none behind the end"
        assert b.detokenizer.token_ids == [73, EOS], says

    def test_token_0_is_a_token(self) -> None:
        scheduler = make_scheduler()
        outputs = scheduler.postprocess([(run(scheduler, "a", 4, 3), [0, 71])])
        assert said(outputs) == [("a", [0, 71], None)], "tokens 0 and 71 were drawn, and both join the answer"

    def test_the_last_token_that_an_answer_may_have_is_in_the_middle_of_a_list(self) -> None:
        scheduler = make_scheduler()
        seq = run(scheduler, "a", 4, 3, max_tokens=2)
        scheduler.postprocess([(seq, [71, 72, 73])])
        assert seq.output_token_ids.tolist() == [71, 72], "max_tokens is 2: the third token is dropped"
        assert seq.status is SequenceStatus.FINISHED_LENGTH, "the answer is as long as it may be"

    def test_who_ends_leaves_at_once(self) -> None:
        cache = CountingCache()
        scheduler = make_scheduler(cache)
        stops, goes_on, full = (run(scheduler, n, 4, 3, max_tokens=m) for n, m in (("s", 9), ("g", 9), ("f", 1)))
        cache.calls.clear()
        outputs = scheduler.postprocess([(stops, [EOS]), (goes_on, [71]), (full, [72])])
        says = "who ends got a token, too, and is returned with the status of its end"
        assert said(outputs) == [("s", [EOS], "stop"), ("g", [71], None), ("f", [72], "length")], says
        assert stops.status is SequenceStatus.FINISHED_STOPPED, "it drew its EOS"
        assert full.status is SequenceStatus.FINISHED_LENGTH, "it may have one token, and has it"
        assert goes_on.status is SequenceStatus.RUNNING and names(scheduler.running) == ["g"], "only g runs on"
        freed = sorted(name for call, name in cache.calls if call == "free")
        assert freed == ["f", "s"], "who ends gives its cache back in this very step, and nobody else"
        assert list(cache.held) == [goes_on], "g keeps its cache"

    def test_a_stop_string(self) -> None:
        scheduler = make_scheduler()
        seq = run(scheduler, "a", 3, 2, stop=["<72>"])
        for token in (71, 72):
            scheduler.postprocess([(seq, [token])])
        assert seq.status is SequenceStatus.FINISHED_STOPPED, "the detokenizer has the text in which the stop string is"
        assert seq.stop_reason == "<72>", "`check_stop_conditions` notes which string it was"
        assert seq.detokenizer.text == "<71>", "the stop string is cut off"


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
