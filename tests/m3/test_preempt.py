"""m3.6: who gives way when no block is free, and what it keeps."""

from itertools import permutations

from folovllm.engine.scheduler import Scheduler, preempt, whole_prompt
from folovllm.request import Sequence
from tests.sequences import CountingCache, make_seq
from tests.tiny import worked_case


def make_scheduler(num_tokens: int = 100, by_priority: bool = False) -> Scheduler:
    return Scheduler(CountingCache(num_tokens), 8, 1000, whole_prompt, preempt, by_priority)


def run(scheduler: Scheduler, name: str, prompt: int = 4, answer: int = 0, priority: int = 0) -> Sequence:
    """A sequence in the middle of its answer: all its tokens but the last are in the cache."""
    seq = make_seq(prompt, name=name, priority=priority)
    for i in range(answer):
        seq.append_token(50 + i)
    seq.start()
    assert scheduler.kv.allocate_slots(seq, seq.num_tokens - 1)
    seq.num_computed_tokens = seq.num_tokens - 1
    scheduler.running.append(seq)
    return seq


class TestPreempt:
    def test_a_worked_case(self) -> None:
        """a, b and c arrived in this order and run in another; one that is more urgent and one that came later wait."""
        scheduler = make_scheduler(by_priority=True)
        a, b, c = (run(scheduler, name) for name in "abc")
        for name, priority in (("later", 0), ("urgent", -1)):
            scheduler.add(make_seq(name=name, priority=priority))
        scheduler.running = [c, a, b]
        victim = preempt(scheduler, [c, a, b])
        held = scheduler.kv.held
        got = {
            "victim": victim and victim.request_id,
            "running": [seq.request_id for seq in scheduler.running],
            "waiting": [seq.request_id for seq in scheduler.waiting],
            "who holds cache": [seq.request_id for seq in (a, b, c) if seq in held],
            "its computed tokens": c.num_computed_tokens,
        }
        answers = ["c", ["a", "b"], ["urgent", "c", "later"], ["a", "b"], 0]
        says = "c arrived last and gives way: without cache, all to be computed again, queued by (priority, arrival)"
        worked_case("m3.6", got, dict(zip(got, answers, strict=True)), says)

    def test_last_to_arrive_wherever_it_stands(self) -> None:
        """After a preemption of its own, an early sequence runs behind later ones."""
        for order in permutations("abc"):
            scheduler = make_scheduler()
            seqs = {name: run(scheduler, name) for name in "abc"}
            scheduler.running = [seqs[name] for name in order]
            assert preempt(scheduler, scheduler.running) is seqs["c"], f"c arrived last, whatever the order: {order}"
            left = [seq.request_id for seq in scheduler.running]
            assert left == [name for name in order if name != "c"], "the others run on, in the order that they had"

    def test_alone_it_is_its_own_victim(self) -> None:
        scheduler = make_scheduler()
        a = run(scheduler, "a")
        assert preempt(scheduler, [a]) is a, "the only one that runs gives way, also if it is the one that needs room"
        assert (scheduler.running, scheduler.waiting) == ([], [a]), "it runs no more and waits"

    def test_priority_goes_before_arrival(self) -> None:
        scheduler = make_scheduler(by_priority=True)
        a, b, c = (run(scheduler, name, priority=p) for name, p in (("a", 2), ("b", 0), ("c", 1)))
        assert preempt(scheduler, [b, a, c]) is a, "a has the largest number: it is the least urgent"

    def test_ahead_of_those_that_never_ran(self) -> None:
        scheduler = make_scheduler()
        a, b, c = (run(scheduler, name) for name in "abc")
        new = make_seq(name="new")
        scheduler.add(new)
        preempt(scheduler, [a, b, c])
        preempt(scheduler, [a, b])
        assert scheduler.waiting == [b, c, new], "in the order in which they arrived, not in that of the preemptions"

    def test_resumes_where_it_was(self) -> None:
        """No room for a fourth token of both: b gives way, and when a has gone computes all it had in one step."""
        scheduler = make_scheduler(num_tokens=12)
        a, b = run(scheduler, "a", 4, 2), run(scheduler, "b", 4, 2)
        assert scheduler.sequences(scheduler.schedule()) == [a, b], "there is room for one token more of each"
        for seq in (a, b):
            seq.append_token(60)  # the pool is full now
        output = scheduler.schedule()
        assert scheduler.sequences(output) == [a], "there is none for another: b gives way to a"
        assert output.preempted == (b.seq_id,), "the step says so"
        scheduler.abort(a)
        output = scheduler.schedule()
        assert scheduler.sequences(output) == [b], "a has gone, and b resumes"
        scheduled_seqs = [(s.start, s.num_new_tokens, s.num_samples) for s in output.scheduled_seqs]
        assert scheduled_seqs == [(0, 7, 1)], "with all its 7 tokens, after which the next one is drawn"
