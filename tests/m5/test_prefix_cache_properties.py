"""Whatever happens, a block is only ever served for the very tokens that it was computed from."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from folovllm.cache import prefix_cache
from folovllm.cache.prefix_cache import PrefixCachingBlockManager, compute_hash
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.request import Request, Sequence, SequenceStatus
from folovllm.sampling_params import SamplingParams

B, N = 2, 12


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences over three tokens, so that prefixes are shared and hashes collide all the time.

    `written` models the device: for each block, the whole prefix of each place's K/V at the time it was written, and
    whose it is: what one tenant's salt names must not serve another's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manager = PrefixCachingBlockManager(N, B)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.written: dict[int, list[tuple[str | int | None, ...] | None]] = {i: [None] * B for i in range(N)}

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=9), salt=st.sampled_from([None, "a"]))
    def arrive(self, tokens: list[int], salt: str | None) -> None:
        request = Request("r", tokens, SamplingParams(), 12, 0, cache_salt=salt)
        seq = Sequence(request, IncrementalDetokenizer(str))
        self.waiting.append(seq)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.waiting))
        self.manager.get_computed_blocks(seq)
        count = data.draw(st.integers(1, seq.num_uncomputed_tokens))
        if not self.manager.allocate_slots(seq, count):
            self.manager.free(seq)
            return
        self.waiting.remove(seq)
        seq.start()
        self.running.append(seq)
        self.compute(seq, count)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 2))
    def advance(self, data: st.DataObject, token: int) -> None:
        seq = data.draw(st.sampled_from(self.running))
        if seq.num_computed_tokens == seq.num_tokens:
            if seq.num_output_tokens == seq.max_tokens:
                return
            seq.append_token(token)
        count = data.draw(st.integers(1, seq.num_uncomputed_tokens))
        if self.manager.allocate_slots(seq, count):
            self.compute(seq, count)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), finished=st.booleans())
    def give_up(self, data: st.DataObject, finished: bool) -> None:
        seq = data.draw(st.sampled_from(self.running))
        self.running.remove(seq)
        if finished:
            seq.finish(SequenceStatus.FINISHED_STOPPED)
            self.manager.free(seq)
        else:
            self.manager.free(seq)
            seq.requeue()
            self.waiting.append(seq)

    @rule()
    def reset(self) -> None:
        self.manager.prefix_cache.reset()

    def compute(self, seq: Sequence, count: int) -> None:
        """Write the K/V of the next tokens, then publish."""
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + count):
            block = seq.block_table[position // B]
            self.written[block][position % B] = self.prefix(seq, position)
        seq.num_computed_tokens += count
        self.manager.cache_blocks(seq)

    @staticmethod
    def prefix(seq: Sequence, position: int) -> tuple[str | int | None, ...]:
        return (seq.request.cache_salt, *seq.token_ids[: position + 1].tolist())

    @invariant()
    def everyone_reads_their_own_tokens(self) -> None:
        for seq in self.running:
            for position in range(seq.num_computed_tokens):
                block = seq.block_table[position // B]
                assert self.written[block][position % B] == self.prefix(seq, position)

    @invariant()
    def blocks_add_up(self) -> None:
        held = [block for seq in self.running for block in seq.block_table]
        for block in self.manager.blocks:
            assert block.ref_count == held.count(block.block_id)
        assert self.manager.num_free == sum(block.ref_count == 0 for block in self.manager.blocks)

    @invariant()
    def names_and_blocks_agree(self) -> None:
        by_hash = self.manager.prefix_cache._by_hash
        assert all(block.hash == hash_ for hash_, block in by_hash.items())
        assert sum(block.hash is not None for block in self.manager.blocks) == len(by_hash)


class WeakHashMachine(PrefixCacheMachine):
    """The same with a hash of two values: collisions everywhere, and still nobody reads a stranger's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix_cache, "compute_hash", lambda tokens, prefix: compute_hash(tokens, prefix) % 2)

    @staticmethod
    def prefix(seq: Sequence, position: int) -> tuple[str | int | None, ...]:
        """A salt is nothing but the start of the hash: where hashes collide, equal tokens may be shared after all."""
        return tuple(seq.token_ids[: position + 1].tolist())

    def teardown(self) -> None:
        self.patch.undo()


PrefixCacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
WeakHashMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestPrefixCache = PrefixCacheMachine.TestCase
TestWeakHash = WeakHashMachine.TestCase
