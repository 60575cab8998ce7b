"""Where drafts do not pay they cost under 2% of the time, and where they are right they pay: over an H200 in virtual time.

The scheduler, the lookups, the policy and `Speculation` are the engine's own. A step takes what one of the embedded model takes
there, and proposers take what their Python takes: nothing of it is hidden behind the device.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from random import Random
from typing import Any

import pytest

from folovllm.cache.block_manager import BlockManager
from folovllm.electives.spec_decode import measure
from folovllm.electives.spec_decode.choose import Curve, StepCost
from folovllm.electives.spec_decode.ngram import NgramProposer
from folovllm.electives.spec_decode.policy import TRUSTED, AdaptiveLength
from folovllm.electives.spec_decode.proposer import CompositeProposer, Proposer, RowState
from folovllm.electives.spec_decode.scheduler import SpeculativeScheduler
from folovllm.electives.spec_decode.speculation import Speculation
from folovllm.electives.spec_decode.suffix import LEARNT_AT_ONCE, SuffixProposer
from folovllm.electives.spec_decode.verify import accept
from folovllm.electives.structured_output.params import StructuredOutputsParams
from folovllm.engine.scheduler import Scheduler, chunk, preempt, unless_finished
from folovllm.request import Sequence
from folovllm.step.schedule import SchedulerOutput, TokenIds
from tests.x3.drafting_loop import sequence

MS = 1e-3
PLAIN = Curve((1, 16, 64, 256), (0.15 * MS, 0.28 * MS, 0.45 * MS, 1.0 * MS))
VERIFYING = Curve((1, 16, 64, 256, 512), (0.32 * MS, 0.35 * MS, 0.5 * MS, 1.1 * MS, 1.7 * MS))
GAP = VERIFYING.seconds[0] - PLAIN.seconds[0]  # what the host waits for, which is the same in a larger model
WAIT = 0.15 * MS  # the device stands still behind a step with drafts until the host has scheduled
A_MASK = 0.08 * MS  # of an answer with a grammar, for each step
A_TOKEN, A_DRAFT = 0.004 * MS, 0.015 * MS  # of a lookup: to take a token in, and to draft
A_CHAIN, A_LINK = 0.25 * MS, 0.03 * MS  # of a head: to start, and each token
A_CHOICE, A_CHOICE_OF_ONE = 0.03 * MS, 0.002 * MS

Texts = SequenceOf[list[int]]


class Clock:
    """Seconds that others let pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Lookup(Proposer):
    """One that takes time."""

    def __init__(self, inner: Proposer, clock: Clock) -> None:
        self.inner, self.clock, self.known = inner, clock, Counter[int]()
        self.finish, self.remember = inner.finish, inner.remember  # type: ignore[method-assign]

    def propose(self, state: RowState, k: int) -> SequenceOf[int]:
        new = max(0, len(state.token_ids) - self.known[state.seq_id])
        self.known[state.seq_id] += new
        self.clock.now += A_DRAFT + A_TOKEN * new
        return self.inner.propose(state, k)

    def propose_all(self, states: SequenceOf[RowState], ks: SequenceOf[int]) -> list[list[int]]:
        if isinstance(self.inner, SuffixProposer):
            ended = [len(answer) + 1 for _, answer in self.inner._ended]
            self.clock.now += A_TOKEN * min(sum(ended), LEARNT_AT_ONCE)
            self.inner._learn()
        return super().propose_all(states, ks)


class Head(Proposer):
    """Knows some of the texts, and is always wrong in others."""

    def __init__(self, clock: Clock, knows: Texts) -> None:
        self.clock, self.knows, self.asked = clock, knows, Counter[int]()

    def propose(self, state: RowState, k: int) -> SequenceOf[int]:
        self.asked[state.seq_id] += 1
        tokens, n = state.token_ids.tolist(), len(state.token_ids)
        text = next((text for text in self.knows if text[:n] == tokens), [99] * (n + k))
        return text[n : n + k]

    def propose_all(self, states: SequenceOf[RowState], ks: SequenceOf[int]) -> list[list[int]]:
        self.clock.now += A_CHAIN + A_LINK * max(ks)
        return super().propose_all(states, ks)


class Choosing(AdaptiveLength):
    """To choose takes time, too."""

    clock: Clock

    def lengths(self, seq_ids: SequenceOf[int]) -> list[int]:
        self.clock.now += A_CHOICE + A_CHOICE_OF_ONE * len(seq_ids)
        return super().lengths(seq_ids)


class Served:
    """An engine without a device: its answers are known. `scale`: how much longer than the embedded model's steps take.

    With `grammars` masks take time. A grammar forces 14 of 20 tokens, or if it is `strict` none, but rules out all other texts.
    """

    def __init__(
        self, max_num_seqs: int, method: str = "", grammars: bool = False, strict: bool = False, scale: float = 1.0,
        knows: Texts = (),
    ) -> None:  # fmt: skip
        def scaled(curve: Curve, kept: float, more: float = 0.0) -> Curve:
            return Curve(curve.widths[:-1], scale * (curve.seconds[:-1] - kept) + kept + more)

        self.plain, self.verifying = scaled(PLAIN, 0.0), scaled(VERIFYING, GAP)
        self.grammar, self.strict = A_MASK if grammars else 0.0, strict
        self.clock, self.texts = Clock(), dict[int, list[int]]()
        common: dict[str, Any] = {
            "kv": BlockManager(max_num_seqs * 160, 16), "max_num_seqs": max_num_seqs, "max_num_batched_tokens": 2**16,
            "tokens_of_step": unless_finished(chunk), "on_full": preempt,
        }  # fmt: skip
        if not method:
            self.scheduler: Scheduler = Scheduler(**common)
            return
        cost = StepCost(scaled(VERIFYING, GAP, -GAP), GAP + measure.GPU_IDLE)  # as they are measured
        self.head = Head(self.clock, knows)
        lookups = {"ngram": NgramProposer, "suffix": SuffixProposer}
        if method == "head":
            cost.first_draft_token, cost.per_draft_token = A_CHAIN, A_LINK
            proposer: Proposer = self.head
        else:
            proposer = CompositeProposer([Lookup(lookups[name](), self.clock) for name in method.split("+")])
        policy = Choosing(cost, 15, *((TRUSTED, 400) if method == "head" else ()))
        policy.clock = self.clock
        self.speculation = Speculation(proposer, policy, self, self.clock)  # type: ignore[arg-type]
        self.scheduler = SpeculativeScheduler(speculation=self.speculation, **common)

    def forced(self, seq: Sequence, most: int) -> list[int]:
        n = seq.num_tokens
        return self.texts[seq.seq_id][n : n + (0 if self.strict else max(0, 14 - n % 20))][:most]

    def trim(self, seq: Sequence, draft: list[int]) -> list[int]:
        if seq.params.structured_outputs is None or not self.strict:
            return draft
        text = self.texts[seq.seq_id][seq.num_tokens :]
        return draft[: next((i for i, (g, t) in enumerate(zip(draft, text, strict=False)) if g != t), len(text))]

    def serve(self, texts: Texts, num_prompt: int = 45, without_grammar: Collection[int] = ()) -> float:
        """The seconds in which all texts are written behind their first `num_prompt` tokens."""
        start, in_flight = self.clock.now, None
        grammar = StructuredOutputsParams(regex=".*") if self.grammar else None  # it says only that there is one
        for i, text in enumerate(texts):
            own = None if i in without_grammar else grammar
            seq = sequence(text[:num_prompt], len(text) - num_prompt, structured_outputs=own)
            self.texts[seq.seq_id] = text
            self.scheduler.add(seq)
        while self.scheduler.running or self.scheduler.waiting:
            if self.scheduler.must_wait():
                self.clock.now += WAIT
                self.collect(in_flight)
                in_flight = None
            output = self.scheduler.schedule()
            before, in_flight = in_flight, (output, self.scheduler.sequences(output)) if output.scheduled_seqs else None
            self.collect(before)
        self.collect(in_flight)
        return self.clock.now - start

    def collect(self, step: tuple[SchedulerOutput, list[Sequence]] | None) -> None:
        if step is None:
            return
        output, seqs = step
        sampled, num_samples = [], sum(scheduled.num_samples for scheduled in output.scheduled_seqs)
        self.clock.now += float((self.verifying if num_samples > len(seqs) else self.plain).at(num_samples))
        self.clock.now += self.grammar * (len(seqs) + 0.1 * num_samples)
        for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True):
            text = self.texts[seq.seq_id][scheduled.end - scheduled.num_samples + 1 : scheduled.end + 1]
            draft: TokenIds = scheduled.token_ids[1:] if scheduled.num_samples > 1 else scheduled.token_ids[:0]
            sampled.append((seq, accept(text, draft.tolist())))
        self.scheduler.postprocess([pair for pair in sampled if not pair[0].status.is_finished])


def story(seed: int, length: int = 245) -> list[int]:
    """Tokens of which some are frequent, so that pairs come again, and what follows them does not."""
    die = Random(seed)
    return [100 + int(600 * die.random() ** 2) for _ in range(length)]


def copied(seed: int, length: int = 320, chance: float = 0.03) -> list[int]:
    """A text that comes again and again; each of its tokens is a new one with a `chance`."""
    die, text = Random(seed), story(seed, 60)
    return [die.randrange(100, 700) if die.random() < chance else text[i % 60] for i in range(length)]


def turns(text: Any, batch: int, count: int, *how: Any) -> list[Texts]:
    return [[text(1000 * turn + i, *how) for i in range(batch)] for turn in range(count)]


def served(
    batch: int, method: str, texts: Iterable[Texts], num_prompt: int = 45, knows: bool = False, **how: Any
) -> tuple[Served, float]:
    """The engine with drafts, and how many times as long it took as without them, over turns of texts."""
    known = [text for turn in texts for text in turn] if knows else []
    plain, drafting = Served(batch, **how), Served(batch, method, **how, knows=known)
    seconds = [(plain.serve(turn, num_prompt), drafting.serve(turn, num_prompt)) for turn in texts]
    return drafting, sum(other for _, other in seconds) / sum(one for one, _ in seconds)


STORIES = {1: turns(story, 1, 8), 8: turns(story, 8, 8), 16: turns(story, 16, 8), 256: turns(story, 256, 2)}


@pytest.mark.parametrize(("batch", "method", "how"), [
    (1, "ngram", {}), (1, "ngram+suffix", {}), (16, "ngram+suffix", {}), (256, "ngram", {}),
    (1, "head", {}), (8, "head", {}), (1, "head", {"grammars": True, "strict": True}),
    (8, "head", {"grammars": True, "strict": True}),
])  # fmt: skip
def test_drafts_that_are_never_right_lose_under_two_percent(batch: int, method: str, how: dict[str, Any]) -> None:
    """From the first step of the engine on: several answers of 200 tokens for each sequence."""
    drafting, ratio = served(batch, method, STORIES[batch], **how)
    assert ratio < 1.02
    assert method != "head" or not drafting.speculation.num_accepted


@pytest.mark.parametrize(("batch", "scale"), [(1, 1.0), (4, 10.0)])
@pytest.mark.parametrize("chance", [0.05, 0.15, 0.4])
def test_texts_that_repeat_themselves_at_times_lose_under_two_percent(batch: int, scale: float, chance: float) -> None:
    """Between texts that always pay and such that never do are those at which a wrong cost would draft at a loss."""
    texts = [copied(i, 345, chance) for i in range(24 * batch)]  # many: the last few have a step to themselves
    assert served(batch, "ngram", [texts], scale=scale)[1] < 1.02


def test_a_long_prompt_is_read_once_and_paid_for() -> None:
    """To read 2,000 tokens takes 50 steps; then nobody asks until that was a hundredth of the time."""
    drafting, ratio = served(4, "ngram+suffix", turns(story, 4, 12, 2100), 2000, scale=2.0)
    plain = drafting.clock.now / ratio
    assert drafting.clock.now < 1.01 * plain + 2 * 2100 * A_TOKEN * 2


@pytest.mark.parametrize(("gain", "batch", "method", "texts", "num_prompt", "how"), [
    (2.0, 1, "ngram", turns(copied, 1, 4), 150, {"grammars": True}),
    (2.0, 1, "ngram+suffix", turns(copied, 1, 4), 150, {"grammars": True}),
    (2.0, 16, "ngram", turns(copied, 16, 4), 150, {"grammars": True}),
    (1.4, 1, "ngram", turns(copied, 1, 4), 150, {"scale": 10.0}),
    (1.4, 16, "ngram", turns(copied, 16, 4), 150, {"scale": 10.0}),
    # Behind what repeats itself come some words that do not, for which many ask in vain: what was won pays for that.
    (2.0, 1, "ngram+suffix", [[copied(i, 290) + story(i, 12)] for i in range(8)], 150, {"grammars": True}),
    (1.8, 1, "head", turns(story, 1, 3), 45, {"knows": True}),
    (1.5, 16, "head", turns(story, 16, 3), 45, {"knows": True}),
])  # fmt: skip
def test_drafts_that_are_right_gain(
    gain: float, batch: int, method: str, texts: list[Texts], num_prompt: int, how: dict[str, Any]
) -> None:
    """With grammars; in a model of which a step takes ten times as long; and a head that knows all texts."""
    assert gain * served(batch, method, texts, num_prompt, **how)[1] < 1


def test_where_a_step_has_no_room_for_drafts_nobody_is_asked() -> None:
    """256 sequences sample as many tokens as there is memory for."""
    drafting, ratio = served(256, "ngram", [[copied(i, 190) for i in range(256)]], 150, grammars=True)
    assert ratio == pytest.approx(1) and not drafting.speculation.num_draft_tokens


def test_after_new_texts_come_some_that_repeat_themselves() -> None:
    """What was lost on stories does not keep drafts off for long."""
    plain, drafting = Served(1), Served(1, "ngram")
    for (text,) in STORIES[1][:6]:
        drafting.serve([text])
    seconds = [(plain.serve([text], 150), drafting.serve([text], 150)) for text in map(copied, range(12))]
    assert seconds[-1][0] > 1.5 * seconds[-1][1]


def test_between_stories_and_grammars_neither_spoils_the_other() -> None:
    """Turns of new texts without a grammar, and of such as repeat themselves with one."""
    plain, drafting = Served(1, grammars=True), Served(1, "ngram+suffix", grammars=True)
    lost = whole = won = plain_of_grammars = 0.0
    for turn in range(12):
        seconds = plain.serve([story(turn)], without_grammar=[0])
        whole += seconds
        lost += drafting.serve([story(turn)], without_grammar=[0]) - seconds
        seconds = plain.serve([copied(turn)], 150)
        plain_of_grammars += seconds
        won += seconds - drafting.serve([copied(turn)], 150)
    assert lost < 0.02 * whole + 12 * AdaptiveLength.SLACK * PLAIN.seconds[0], "what was won may be lost in each turn"
    assert won > 0.3 * plain_of_grammars


@pytest.mark.parametrize(("batch", "gain"), [(1, 1.5), (16, 1.3)])
def test_what_a_grammar_forces_pays_for_itself(batch: int, gain: float) -> None:
    """Beside a head that is never right."""
    drafting, ratio = served(batch, "head", [[copied(i) for i in range(batch)]] * 3, grammars=True)
    assert gain * ratio < 1
    assert max(drafting.head.asked.values()) <= 7, "of 275 steps"


def test_others_in_the_batch_are_still_served() -> None:
    """One answer has a grammar that rules out what the head drafts, and the head knows the other one."""
    texts = [story(1, 400), story(2, 400)]
    drafting = Served(2, "head", grammars=True, strict=True, knows=texts[1:])
    drafting.serve(texts, without_grammar=[1])
    assert drafting.speculation.num_accepted > 200
