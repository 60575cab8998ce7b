"""Requests that come and go at random, over a device that only remembers: a scheduler with drafts, a cache, and nothing else."""

import random
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any

from folovllm.cache.block_manager import BlockManager
from folovllm.electives.spec_decode.policy import LengthPolicy
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.electives.spec_decode.scheduler import SpeculativeScheduler
from folovllm.electives.spec_decode.speculation import DraftRules, Speculation
from folovllm.electives.spec_decode.verify import accept
from folovllm.engine import events as ev
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.scheduler import chunk, preempt, unless_finished, will_finish
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.step.packed import IN_FLIGHT
from folovllm.step.schedule import SchedulerOutput
from tests.m3.test_state_machines import assert_blocks_add_up
from tests.sequences import EOS

POISON = ()


def next_token(tokens: SequenceOf[int]) -> int:
    """The model: two tokens, so that drafts are often right and prefixes often shared; at times an end."""
    mixed = hash(tuple(tokens))
    return EOS if mixed % 29 == 0 else mixed // 29 % 2


class Coin(Proposer):
    """Drafts at random, and notes who is served."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.open = rng, set[int]()

    def propose(self, state: RowState, k: int) -> list[int]:
        self.open.add(state.seq_id)
        return [self.rng.randrange(2) for _ in range(self.rng.randint(0, k))]

    def finish(self, seq_id: int) -> None:
        self.open.remove(seq_id)


class AtTimes(LengthPolicy):
    """Drafts now and then."""

    def __init__(self, rng: random.Random, k: int) -> None:
        super().__init__(k)
        self.rng = rng

    def lengths(self, seq_ids: SequenceOf[int]) -> list[int]:
        most = self.rng.choice((0, self.most))
        return [self.rng.randint(0, most) for _ in seq_ids]


class Device:
    """Keeps in each slot which tokens its K/V stands for: the token's own and all before it."""

    def __init__(self, kv: BlockManager) -> None:
        self.size, self.slots = kv.block_size, [[POISON] * kv.block_size for _ in range(kv.num_blocks)]
        self.tables: dict[int, list[int]] = {}
        self.newest: dict[int, int] = {}

    def hear(self, events: SequenceOf[ev.Event]) -> None:
        """Contents that nobody may read again become poison."""
        for event in events:
            if isinstance(event, ev.TableCut | ev.BlockTaken):
                self.slots[event.block_id] = [POISON] * self.size

    def seen(self, end: int) -> range:
        """The positions that the last of `end` tokens attends to."""
        return range(end)

    def run(self, output: SchedulerOutput) -> list[list[int]]:
        """Write all K/V of the step, then read it and sample."""
        sampled = []
        texts = [self.write(scheduled) for scheduled in output.scheduled_seqs]
        for scheduled, text in zip(output.scheduled_seqs, texts, strict=True):
            for end in range(scheduled.start + 1, scheduled.end + 1):
                seen = self.seen(end)
                read = [self.slots[self.tables[scheduled.row][p // self.size]][p % self.size] for p in seen]
                assert read == [tuple(text[: p + 1]) for p in seen], "a token saw K/V that is not its own"
            first = scheduled.end - scheduled.num_samples + 1
            tokens = [next_token(text[:end]) for end in range(first, scheduled.end + 1)]
            sampled.append(accept(tokens, text[first:]) if tokens else [])
            self.newest[scheduled.row] = sampled[-1][-1] if sampled[-1] else -1
        return sampled

    def write(self, scheduled: Any) -> list[int]:
        """Take over the share's blocks, store its tokens; returns all of the text that the share knows."""
        table = [] if scheduled.sampling is not None else self.tables[scheduled.row]
        table[scheduled.first_new_block :] = scheduled.new_blocks
        self.tables[scheduled.row] = table
        tokens = scheduled.token_ids.tolist() or [IN_FLIGHT]
        tokens = [self.newest[scheduled.row] if token == IN_FLIGHT else token for token in tokens]
        before = scheduled.start - 1
        text = list(self.slots[table[before // self.size]][before % self.size]) if scheduled.start else []
        for position, token in enumerate(tokens, scheduled.start):
            text.append(token)
            self.slots[table[position // self.size]][position % self.size] = tuple(text)
        return text


class Loop:
    """The loop of overlapped steps, with nothing but the scheduler, the cache and the device."""

    def __init__(
        self, kv: BlockManager, device: Device, rng: random.Random, k: int, budget: int,
        add_up: Callable[[Any, list[Sequence]], None] = assert_blocks_add_up,
    ) -> None:  # fmt: skip
        self.kv, self.device, self.rng, self.add_up, self.proposer = kv, device, rng, add_up, Coin(rng)
        self.scheduler = SpeculativeScheduler(
            kv=kv, max_num_seqs=4, max_num_batched_tokens=budget, tokens_of_step=unless_finished(chunk), on_full=preempt,
            speculation=Speculation(self.proposer, AtTimes(rng, k), DraftRules()),
        )  # fmt: skip
        kv.events.subscribe(self.device.hear, ev.Snapshot(kv.num_blocks, kv.block_size, 4, budget, 0, (), ()))
        self.in_flight: tuple[SchedulerOutput, list[Sequence], list[list[int]]] | None = None

    def run(self, longest: int) -> None:
        """Requests of at most `longest` tokens, in the first turns; each ends, and its text is what the model says."""
        rng, seqs = self.rng, list[Sequence]()
        for turn in range(10_000):
            if turn < 12 and rng.random() < 0.7:
                prompt = [rng.randrange(2) for _ in range(rng.randint(1, longest // 2))]
                seqs.append(sequence(prompt, rng.randint(1, longest - len(prompt))))
                self.scheduler.add(seqs[-1])
            if rng.random() < 0.03 and seqs and not (victim := rng.choice(seqs)).status.is_finished:
                self.scheduler.abort(victim)
            if turn >= 12 and all(seq.status.is_finished for seq in seqs):
                break
            self.step()
        self.collect()
        self.check()
        assert all(seq.status.is_finished for seq in seqs) and not self.proposer.open
        assert self.kv.num_used == 0
        for seq in seqs:
            text = seq.token_ids.tolist()
            assert all(next_token(text[:i]) == text[i] for i in range(seq.num_prompt_tokens, len(text)))

    def step(self) -> None:
        if self.scheduler.must_wait():
            self.collect()
        output = self.scheduler.schedule()
        self.kv.events.drain()
        self.check_price(output)
        started = None
        if output.scheduled_seqs:
            started = output, self.scheduler.sequences(output), self.device.run(output)
        self.collect()
        self.in_flight = started
        self.check()

    def collect(self) -> None:
        if self.in_flight is not None:
            (_, seqs, sampled), self.in_flight = self.in_flight, None
            pairs = zip(seqs, sampled, strict=True)
            self.scheduler.postprocess([(seq, tokens) for seq, tokens in pairs if not seq.status.is_finished])
            self.kv.events.drain()

    def check_price(self, output: SchedulerOutput) -> None:
        """Nobody gives way to a draft, no answer waits for one, and none is beyond an answer's greatest length."""
        for scheduled, seq in zip(output.scheduled_seqs, self.scheduler.sequences(output), strict=True):
            assert scheduled.end < seq.num_prompt_tokens + seq.max_tokens
        size, drafted = self.kv.block_size, [s for s in output.scheduled_seqs if s.num_samples > 1]
        if output.preempted:
            assert all(-(-scheduled.end // size) == -(-(scheduled.start + 1) // size) for scheduled in drafted)
        elif drafted:
            own = {scheduled.seq_id for scheduled in output.scheduled_seqs}
            assert all(seq.seq_id in own or will_finish(seq) for seq in self.scheduler.running if seq.num_output_tokens)

    def check(self) -> None:
        self.add_up(self.kv, self.scheduler.running)
        assert self.kv.events.on, "the device failed"
        for block in self.kv.blocks:
            if block.hash is not None:
                own = self.device.slots[block.block_id]
                assert [tokens[-1] for tokens in own] == memoryview(block.token_ids).cast("i").tolist()


def sequence(prompt: list[int], max_tokens: int, **params: Any) -> Sequence:
    request = Request("r", prompt, SamplingParams(max_tokens=max_tokens, **params), max_tokens, 0, frozenset({EOS}))
    return Sequence(request, IncrementalDetokenizer(lambda ids: ""))


def small_scheduler(proposer: Proposer, policy: LengthPolicy) -> SpeculativeScheduler:
    """A scheduler of 64 blocks of four tokens, and steps of 64 tokens."""
    return SpeculativeScheduler(
        kv=BlockManager(64, 4), max_num_seqs=4, max_num_batched_tokens=64, tokens_of_step=unless_finished(chunk),
        on_full=preempt, speculation=Speculation(proposer, policy, DraftRules()),
    )  # fmt: skip
