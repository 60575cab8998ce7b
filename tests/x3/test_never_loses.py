"""What speculation costs where nothing repeats itself, and what it brings where all does, over an H200 in virtual time.

The scheduler, the proposers and those who decide are the engine's own. A step takes what one of the embedded model takes
there, and proposers take what their Python takes: nothing of it is hidden behind the device.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from random import Random

import pytest

from folovllm.cache.block_manager import BlockManager
from folovllm.engine.overlap_scheduler import OverlapScheduler
from folovllm.engine.scheduler import chunk, preempt
from folovllm.engine.speculation import Speculation
from folovllm.engine.speculative_scheduler import SpeculativeOverlapScheduler
from folovllm.request import Sequence
from folovllm.spec.adaptive import AdaptiveDepth
from folovllm.spec.choose import Curve, StepCost
from folovllm.spec.ngram import NgramProposer
from folovllm.spec.proposer import Proposer, RowState
from folovllm.spec.budget import Budget
from folovllm.spec.registry import LOAN, InTurn
from folovllm.spec.shadow import Shadow
from folovllm.spec.suffix import SuffixProposer
from folovllm.step.schedule import SchedulerOutput
from folovllm.step.verify import accept
from tests.x3.guessing_loop import NoForms, sequence

MS = 1e-3
PLAIN = Curve((1, 16, 64, 256), (0.15 * MS, 0.28 * MS, 0.45 * MS, 1.0 * MS))
CHECKED = Curve((1, 16, 64, 256, 512), (0.32 * MS, 0.35 * MS, 0.5 * MS, 1.1 * MS, 1.7 * MS))
WAIT = 0.15 * MS  # the device stands still behind a step with guesses until the host has scheduled
A_MASK = 0.08 * MS  # of an answer with a form, for each step
A_TOKEN, A_GUESS = 0.004 * MS, 0.015 * MS  # of a proposer: to take a token in, and to guess


class Clock:
    """Seconds that others let pass."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Proposer):
    """A proposer that takes time."""

    def __init__(self, inner: Proposer, clock: Clock) -> None:
        self.inner, self.clock, self.known = inner, clock, dict[int, int]()

    def propose(self, state: RowState, k: int) -> SequenceOf[int]:
        seen = self.known.get(state.seq_id, 0)
        self.known[state.seq_id] = max(seen, len(state.token_ids))
        self.clock.now += A_GUESS + A_TOKEN * max(0, len(state.token_ids) - seen)
        return self.inner.propose(state, k)

    def propose_all(self, states: SequenceOf[RowState], ks: SequenceOf[int]) -> list[list[int]]:
        self.look(states)
        return super().propose_all(states, ks)

    def look(self, states: SequenceOf[RowState]) -> None:
        if isinstance(self.inner, SuffixProposer):
            before = self.inner._past.num_tokens
            self.inner.look(states)
            self.clock.now += A_TOKEN * (self.inner._past.num_tokens - before)

    def admit(self, state: RowState) -> None:
        self.inner.admit(state)

    def observe(self, seq_id: int, token_ids: SequenceOf[int]) -> None:
        self.inner.observe(seq_id, token_ids)

    def finish(self, seq_id: int) -> None:
        self.inner.finish(seq_id)


class Served:
    """An engine without a device: its answers are known. With `forms` they are forced in part, and masks take time.

    `scale`: how much longer than the embedded model's steps take.
    """

    def __init__(self, max_num_seqs: int, methods: str = "", forms: bool = False, scale: float = 1.0) -> None:
        self.scale, self.form = scale, A_MASK if forms else 0.0
        self.clock, self.texts = Clock(), dict[int, list[int]]()
        common = dict(
            kv=BlockManager(max_num_seqs * 160, 16), max_num_seqs=max_num_seqs, max_num_batched_tokens=2**16,
            tokens_of_step=chunk, make_room=preempt,
        )  # fmt: skip
        if not methods:
            self.scheduler: OverlapScheduler = OverlapScheduler(**common)
            return
        kinds = {"ngram": NgramProposer, "suffix": SuffixProposer}
        tables = (Curve(widths, tuple(scale * s for s in seconds)) for widths, seconds in (PLAIN, CHECKED))
        tries, looks = (Budget(LOAN * scale * PLAIN.seconds[0], self.clock) for _ in range(2))
        depth = AdaptiveDepth(StepCost(*tables), 15, tries)
        proposer = InTurn([Slow(kinds[name](), self.clock) for name in methods.split("+")])
        self.speculation = Speculation(Shadow(proposer, depth, looks), depth, self if forms else NoForms(), self.clock)
        self.scheduler = SpeculativeOverlapScheduler(speculation=self.speculation, **common)

    def forced(self, seq: Sequence, most: int) -> list[int]:
        n = seq.num_tokens
        return self.texts[seq.seq_id][n : n + max(0, 14 - n % 20)][:most]

    def trim(self, seq: Sequence, guesses: list[int]) -> list[int]:
        return guesses

    def serve(self, texts: list[list[int]], num_prompt: int) -> float:
        """The seconds in which all texts are written behind their first `num_prompt` tokens."""
        start, flying = self.clock.now, None
        seqs = [sequence(text[:num_prompt], len(text) - num_prompt) for text in texts]
        for seq, text in zip(seqs, texts, strict=True):
            self.texts[seq.seq_id] = text
            self.scheduler.add(seq)
        while self.scheduler.running or self.scheduler.waiting:
            if self.scheduler.must_wait():
                self.clock.now += WAIT
                self.collect(flying)
                flying = None
            output = self.scheduler.schedule()
            before, flying = flying, (output, self.scheduler.sequences(output)) if output.shares else None
            self.collect(before)
        self.collect(flying)
        return self.clock.now - start

    def collect(self, step: tuple[SchedulerOutput, list[Sequence]] | None) -> None:
        if step is None:
            return
        output, seqs = step
        drawn, num_draws = [], sum(share.num_draws for share in output.shares)
        self.clock.now += self.scale * (CHECKED if num_draws > len(seqs) else PLAIN).at(num_draws)
        self.clock.now += self.form * (len(seqs) + 0.1 * num_draws)
        for share, seq in zip(output.shares, seqs, strict=True):
            text, at = self.texts[seq.seq_id], share.end - share.num_draws + 1
            text = text[at : share.end + 1]
            drawn.append((seq, accept(text, share.token_ids[1:].tolist() if share.num_draws > 1 else [])))
        self.scheduler.postprocess([pair for pair in drawn if not pair[0].status.is_finished])


def story(seed: int, length: int) -> list[int]:
    """Tokens of which some are frequent, so that pairs come again, and what follows them does not."""
    die = Random(seed)
    return [100 + int(600 * die.random() ** 2) for _ in range(length)]


def copied(seed: int, length: int) -> list[int]:
    """A text that comes again and again, with a new word in it now and then."""
    die, text = Random(seed), story(seed, 60)
    return [token if die.random() > 0.03 else die.randrange(100, 700) for token in (text * (length // 60 + 1))[:length]]


if __name__ == "__main__":
    for method in ("ngram", "ngram+suffix"):
        for batch in (1, 16, 256):
            for make, prompt, length, forms, scale in ((story, 45, 245, False, 1), (copied, 150, 320, True, 1), (copied, 150, 320, False, 10), (story, 2000, 2200, False, 10)):
                if batch == 256 and prompt > 1000: continue
                plain, guessing = Served(batch, "", forms, scale), Served(batch, method, forms, scale)
                print(method, batch, make.__name__, prompt, forms, scale, end=": ")
                for turn in range(4 if batch < 99 else 3):
                    texts = [make(turn * 1000 + i, length) for i in range(batch)]
                    a, b = plain.serve(texts, prompt), guessing.serve(texts, prompt)
                    sp = guessing.speculation
                    print(f"{a/b:.3f} ({1e3*(b-a):.2f} of {1e3*a:.1f} ms; {sp.num_drafts} {sp.num_accepted}/{sp.num_guessed})", end="  ")
                print()
