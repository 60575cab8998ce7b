"""Whatever happens, a block is only ever served for the very tokens that it was computed from."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from folovllm.cache import prefix_cache
from folovllm.cache.prefix_cache import PrefixCachingBlockManager, compute_hash
from tests.builders import test_prefix_cache as builder

BY_THE_PROTOCOL = [
    test for name, test in vars(builder).items()
    if name.startswith("test_") and "engine" not in name and "any_order" not in name  # below with more invariants
]  # fmt: skip


@pytest.mark.parametrize("test", BY_THE_PROTOCOL, ids=lambda test: test.__name__)
def test_what_any_prefix_cache_must_do(test: Callable[[type[PrefixCachingBlockManager]], None]) -> None:
    test(PrefixCachingBlockManager)


class PrefixCacheMachine(builder.Machine):
    """What any prefix cache must do, and what this one has inside."""

    component = PrefixCachingBlockManager

    @invariant()
    def everyone_reads_their_own_tokens(self) -> None:
        if hasattr(self, "bench"):
            for seq in self.bench.running:
                self.bench.check(seq)

    @invariant()
    def holders_are_counted_and_names_agree(self) -> None:
        if not hasattr(self, "bench"):
            return
        kv = self.bench.kv
        held = [block for seq in self.bench.running for block in seq.block_table]
        assert all(block.ref_count == held.count(block.block_id) for block in kv.blocks)
        assert kv.num_free == sum(block.ref_count == 0 for block in kv.blocks)
        by_hash = kv.prefix_cache._by_hash
        assert all(block.hash == hash_ for hash_, block in by_hash.items())
        assert sum(block.hash is not None for block in kv.blocks) == len(by_hash)


class WeakHashMachine(PrefixCacheMachine):
    """The same with a hash of two values: collisions everywhere, and still nobody reads a stranger's tokens.

    A salt is nothing but the start of the hash: where hashes collide, equal tokens may be shared after all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(prefix_cache, "compute_hash", lambda tokens, prefix: compute_hash(tokens, prefix) % 2)
        self.patch.setattr(builder.Bench, "prefix", lambda _, seq, p: tuple(seq.token_ids[: p + 1]))

    def teardown(self) -> None:
        self.patch.undo()


PrefixCacheMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
WeakHashMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)
TestPrefixCache = PrefixCacheMachine.TestCase
TestWeakHash = WeakHashMachine.TestCase
