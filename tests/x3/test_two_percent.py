"""Where drafts do not pay they cost under 2% of the time, and where all repeats itself they pay: over an H200 in virtual time.

The scheduler, the proposers and those who decide are the engine's own. A step takes what one of the embedded model takes
there, and proposers take what their Python takes: nothing of it is hidden behind the device.
"""

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from random import Random
from typing import Any

import pytest

from folovllm.cache.block_manager import BlockManager
from folovllm.electives.spec_decode import measure
from folovllm.electives.spec_decode.choose import Curve, StepCost
from folovllm.electives.spec_decode.ngram import NgramProposer
from folovllm.electives.spec_decode.policy import TRUSTED, UNKNOWN, AdaptiveLength
from folovllm.electives.spec_decode.proposer import CompositeProposer, Proposer, RowState
from folovllm.electives.spec_decode.scheduler import SpeculativeScheduler
from folovllm.electives.spec_decode.speculation import Speculation
from folovllm.electives.spec_decode.suffix import SuffixProposer
from folovllm.electives.spec_decode.verify import accept
from folovllm.electives.structured_output.params import StructuredOutputsParams
from folovllm.engine.scheduler import Scheduler, chunk, preempt, unless_finished
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput, TokenIds
from tests.x3.drafting_loop import Clock, NoGrammar, sequence

MS = 1e-3
PLAIN = Curve((1, 16, 64, 256), (0.15 * MS, 0.28 * MS, 0.45 * MS, 1.0 * MS))
CHECKED = Curve((1, 16, 64, 256, 512), (0.32 * MS, 0.35 * MS, 0.5 * MS, 1.1 * MS, 1.7 * MS))
WAIT = 0.15 * MS  # the device stands still behind a step with drafts until the host has scheduled
A_MASK = 0.08 * MS  # of an answer with a grammar, for each step
A_TOKEN, A_DRAFT = 0.004 * MS, 0.015 * MS  # of a proposer: to take a token in, and to draft
A_CHOICE, A_CHOICE_OF_ONE = 0.03 * MS, 0.002 * MS


GAP = CHECKED.seconds[0] - PLAIN.seconds[0]  # what the host waits for, which is the same in a larger model


def scaled(curve: Curve, scale: float, more: float = 0.0) -> Curve:
    """The curve of a model whose steps keep the device `scale` times as long."""
    kept = GAP if curve is CHECKED else 0.0
    return Curve(curve.widths[:-1], scale * (curve.seconds[:-1] - kept) + kept + more)


class Slow(Proposer):
    """A proposer that takes time."""

    def __init__(self, inner: Proposer, clock: Clock) -> None:
        self.inner, self.clock, self.known = inner, clock, dict[int, int]()

    def propose(self, state: RowState, k: int) -> SequenceOf[int]:
        seen = self.known.get(state.seq_id, 0)
        self.known[state.seq_id] = max(seen, len(state.token_ids))
        self.clock.now += A_DRAFT + A_TOKEN * max(0, len(state.token_ids) - seen)
        return self.inner.propose(state, k)

    def propose_all(self, states: SequenceOf[RowState], ks: SequenceOf[int]) -> list[list[int]]:
        if isinstance(self.inner, SuffixProposer):
            before = self.inner._past.num_tokens
            self.inner._learn()
            self.clock.now += A_TOKEN * (self.inner._past.num_tokens - before)
        return super().propose_all(states, ks)

    def admit(self, state: RowState) -> None:
        self.inner.admit(state)

    def observe(self, seq_id: int, token_ids: SequenceOf[int]) -> None:
        self.inner.observe(seq_id, token_ids)

    def finish(self, seq_id: int) -> None:
        self.inner.finish(seq_id)

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        self.inner.remember(answer, cache_salt)


class Choosing(AdaptiveLength):
    """To choose takes time, too."""

    def __init__(self, cost: StepCost, most: int, clock: Clock, **rest: Any) -> None:
        super().__init__(cost, most, **rest)
        self.clock = clock

    def lengths(self, seq_ids: SequenceOf[int]) -> list[int]:
        self.clock.now += A_CHOICE + A_CHOICE_OF_ONE * len(seq_ids)
        return super().lengths(seq_ids)


class Served:
    """An engine without a device: its answers are known. With `grammars` they are forced in part, and masks take time.

    `scale`: how much longer than the embedded model's steps take.
    """

    def __init__(
        self, max_num_seqs: int, methods: str = "", grammars: bool = False, scale: float = 1.0,
        clock: Clock | None = None, draft: Proposer | None = None,
    ) -> None:  # fmt: skip
        self.plain, self.verifying = scaled(PLAIN, scale), scaled(CHECKED, scale)
        self.grammar = A_MASK if grammars else 0.0
        self.clock, self.texts = clock or Clock(), dict[int, list[int]]()
        common: dict[str, Any] = {
            "kv": BlockManager(max_num_seqs * 160, 16), "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2**16,
            "tokens_of_step": unless_finished(chunk), "on_full": preempt,
        }  # fmt: skip
        if not (methods or draft):
            self.scheduler: Scheduler = Scheduler(**common)
            return
        kinds = {"ngram": NgramProposer, "suffix": SuffixProposer}
        cost = StepCost(scaled(CHECKED, scale, -GAP), GAP + measure.GPU_IDLE)  # as they are measured
        self.policy = Choosing(cost, 15, self.clock, first=TRUSTED if draft else UNKNOWN)
        proposer = draft or CompositeProposer([Slow(kinds[name](), self.clock) for name in methods.split("+")])
        self.speculation = Speculation(proposer, self.policy, self if grammars else NoGrammar(), self.clock)
        self.scheduler = SpeculativeScheduler(speculation=self.speculation, **common)

    def forced(self, seq: Sequence, most: int) -> list[int]:
        if seq.params.structured_outputs is None:
            return []
        n = seq.num_tokens
        return self.texts[seq.seq_id][n : n + max(0, 14 - n % 20)][:most]

    def trim(self, seq: Sequence, drafts: list[int]) -> list[int]:
        return drafts

    def serve(self, texts: list[list[int]], num_prompt: int, without_grammar: Collection[int] = ()) -> float:
        """The seconds in which all texts are written behind their first `num_prompt` tokens."""
        start, flying = self.clock.now, None
        grammar = StructuredOutputsParams(regex=".*") if self.grammar else None  # it says only that there is one
        grammars = [None if i in without_grammar else grammar for i in range(len(texts))]
        pairs = zip(texts, grammars, strict=True)
        seqs = [sequence(text[:num_prompt], len(text) - num_prompt, structured_outputs=own) for text, own in pairs]
        for seq, text in zip(seqs, texts, strict=True):
            self.texts[seq.seq_id] = text
            self.scheduler.add(seq)
        while self.scheduler.running or self.scheduler.waiting:
            if self.scheduler.must_wait():
                self.clock.now += WAIT
                self.collect(flying)
                flying = None
            output = self.scheduler.schedule()
            before, flying = flying, (output, self.scheduler.sequences(output)) if output.scheduled_seqs else None
            self.collect(before)
        self.collect(flying)
        return self.clock.now - start

    def collect(self, step: tuple[SchedulerOutput, list[Sequence]] | None) -> None:
        if step is None:
            return
        output, seqs = step
        sampled, num_samples = [], sum(scheduled.num_samples for scheduled in output.scheduled_seqs)
        self.clock.now += float((self.verifying if num_samples > len(seqs) else self.plain).at(num_samples))
        self.clock.now += self.grammar * (len(seqs) + 0.1 * num_samples)
        for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True):
            text, at = self.texts[seq.seq_id], scheduled.end - scheduled.num_samples + 1
            text = text[at : scheduled.end + 1]
            sampled.append((seq, accept(text, scheduled.token_ids[1:].tolist() if scheduled.num_samples > 1 else [])))
        self.scheduler.postprocess([pair for pair in sampled if not pair[0].status.is_finished])


def story(seed: int, length: int) -> list[int]:
    """Tokens of which some are frequent, so that pairs come again, and what follows them does not."""
    die = Random(seed)
    return [100 + int(600 * die.random() ** 2) for _ in range(length)]


def copied(seed: int, length: int, chance: float = 0.03) -> list[int]:
    """A text that comes again and again; each of its tokens is a new one with a `chance`."""
    die, text = Random(seed), story(seed, 60)
    return [die.randrange(100, 700) if die.random() < chance else text[i % 60] for i in range(length)]


def both(
    batch: int, methods: str, turns: list[list[list[int]]], num_prompt: int, **how: Any
) -> tuple[Served, float, float]:
    """The engine with drafts, and the seconds that all turns took without them and with them."""
    plain, drafting = Served(batch, **how), Served(batch, methods, **how)
    seconds = [(plain.serve(texts, num_prompt), drafting.serve(texts, num_prompt)) for texts in turns]
    return drafting, sum(one for one, _ in seconds), sum(other for _, other in seconds)


def stories(batch: int, num_turns: int, length: int = 245) -> list[list[list[int]]]:
    return [[story(1000 * turn + i, length) for i in range(batch)] for turn in range(num_turns)]


@pytest.mark.parametrize(
    ("batch", "methods"), [(1, "ngram"), (1, "ngram+suffix"), (16, "ngram+suffix"), (256, "ngram")]
)
def test_new_texts_lose_under_two_percent(batch: int, methods: str) -> None:
    """From the first step of the engine on: several answers of 200 tokens for each sequence."""
    _, plain, drafting = both(batch, methods, stories(batch, 8 if batch < 256 else 2), 45)
    assert drafting < 1.02 * plain


@pytest.mark.parametrize(("batch", "scale"), [(1, 1.0), (4, 10.0)])
def test_texts_that_repeat_themselves_at_times_lose_under_two_percent(batch: int, scale: float) -> None:
    """Between texts that always pay and such that never do are those at which a wrong cost would draft at a loss."""
    for chance in (0.05, 0.15, 0.4):
        texts = [copied(i, 345, chance) for i in range(24 * batch)]  # many: the last few have a step to themselves
        _, plain, drafting = both(batch, "ngram", [texts], 45, scale=scale)
        assert drafting < 1.02 * plain, f"{chance}"


def test_a_long_prompt_is_read_once_and_paid_for() -> None:
    """To read 2,000 tokens takes 50 steps; then nobody asks until that was a hundredth of the time."""
    _, plain, seconds = both(4, "ngram+suffix", stories(4, 12, 2100), 2000, scale=2.0)
    assert seconds - plain < 0.01 * plain + 2 * 2100 * A_TOKEN * 2


@pytest.mark.parametrize(
    ("batch", "gain", "methods"), [(1, 2.0, "ngram"), (1, 2.0, "ngram+suffix"), (16, 2.0, "ngram")]
)
def test_texts_that_repeat_themselves_gain(batch: int, gain: float, methods: str) -> None:
    """With grammars; and in a model of which a step takes ten times as long, without grammars."""
    turns = [[copied(1000 * turn + i, 320) for i in range(batch)] for turn in range(4)]
    _, plain, drafting = both(batch, methods, turns, 150, grammars=True)
    assert plain > gain * drafting
    _, plain, drafting = both(batch, methods, turns, 150, scale=10.0)
    assert plain > min(gain, 1.4) * drafting


def test_where_a_step_has_no_room_for_drafts_nobody_is_asked() -> None:
    """256 sequences sample as many tokens as there is memory for."""
    drafting, plain, seconds = both(256, "ngram", [[copied(i, 190) for i in range(256)]], 150, grammars=True)
    assert seconds == pytest.approx(plain) and not drafting.speculation.num_draft_tokens


def test_after_new_texts_come_some_that_repeat_themselves() -> None:
    """What was lost on stories does not keep drafts off for long."""
    plain, drafting = Served(1), Served(1, "ngram")
    for turn in range(6):
        drafting.serve([story(turn, 245)], 45)
    texts = [copied(i, 320) for i in range(12)]
    seconds = [(plain.serve([text], 150), drafting.serve([text], 150)) for text in texts]
    assert seconds[-1][0] > 1.5 * seconds[-1][1]


def test_the_end_of_an_answer_does_not_silence_the_next_one() -> None:
    """Behind what repeats itself come some words that do not, for which many ask in vain: what was won pays for that."""
    texts = [copied(i, 290) + story(i, 12) for i in range(8)]
    drafting, plain, seconds = both(1, "ngram+suffix", [[text] for text in texts], 150, grammars=True)
    assert plain > 2.0 * seconds
    assert drafting.speculation.num_accepted > 0.6 * 8 * 140, "nearly all of what is copied"


def test_between_stories_and_grammars_neither_spoils_the_other() -> None:
    """Turns of new texts without a grammar, and of such as repeat themselves with one."""
    plain, drafting = Served(1, grammars=True), Served(1, "ngram+suffix", grammars=True)
    lost = whole = won = plain_of_grammars = 0.0
    for turn in range(12):
        seconds = plain.serve([story(turn, 245)], 45, without_grammar=[0])
        whole += seconds
        lost += drafting.serve([story(turn, 245)], 45, without_grammar=[0]) - seconds
        seconds = plain.serve([copied(turn, 320)], 150)
        plain_of_grammars += seconds
        won += seconds - drafting.serve([copied(turn, 320)], 150)
    assert lost < 0.02 * whole + 12 * AdaptiveLength.SLACK * PLAIN.seconds[0], "what was won may be lost in each turn"
    assert won > 0.3 * plain_of_grammars


class Knows(Proposer):
    """A head that is always right."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def propose(self, state: RowState, k: int) -> list[int]:
        n = len(state.token_ids)
        return self.texts[state.seq_id][n : n + k]


class SlowHost(Served):
    """An engine whose host works for each sequence with a draft while the device stands still: no measurement at the start tells that."""

    A_SEQUENCE = 0.4 * MS

    def collect(self, step: tuple[SchedulerOutput, list[Sequence]] | None) -> None:
        if step is not None:
            self.clock.now += self.A_SEQUENCE * sum(scheduled.num_samples > 1 for scheduled in step[0].scheduled_seqs)
        super().collect(step)


@pytest.mark.parametrize("wrong", [0.5, 1.0, 3.0])
def test_drafts_that_are_right_and_take_too_long_lose_under_two_percent(wrong: float) -> None:
    """`wrong`: times what plain steps take the measurement at the start has found. By 3.0 each accepted token would seem to win."""
    plain, knows = Served(8), Knows()
    drafting = SlowHost(8, draft=knows)
    drafting.policy.cost.curve.seconds *= wrong
    knows.texts = drafting.texts
    texts = [story(i, 245) for i in range(240)]
    lost = drafting.serve(texts, 45) / plain.serve(texts, 45)
    assert drafting.speculation.num_accepted > 0 and lost < 1.02
