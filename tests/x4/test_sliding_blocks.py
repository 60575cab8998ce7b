"""Blocks behind a window are given back while a sequence runs, and nothing that a token sees is ever another's."""

import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from folovllm.cache import prefix_cache
from folovllm.cache.block_manager import BlockManager
from folovllm.cache.prefix_cache import PrefixCachingBlockManager
from folovllm.cache.sliding import GONE, SlidingBlockManager, SlidingPrefixCachingBlockManager, sliding
from folovllm.config import EngineConfig
from folovllm.engine import events as ev
from folovllm.engine.llm_engine import make_engine
from folovllm.worker.kv_memory import most_held
from tests.helpers import tiny_checkpoint
from tests.sequences import make_seq
from tests.workloads import answered, mixed_requests, serve
from tests.x3.drafting_loop import POISON, Device, Loop


def alike(token_ids: Any, prefix: int) -> int:
    """A hash with which all blocks behind the same block collide."""
    return prefix + 1


class SlidingDevice(Device):
    """Reads the K/V in each token's window. A block that nobody can find again is poison as soon as it is free."""

    def __init__(self, kv: Any) -> None:
        super().__init__(kv)
        self.window, self.forgets = kv.window, not isinstance(kv, PrefixCachingBlockManager)

    def hear(self, events: Any) -> None:
        super().hear(events)
        for event in events:
            if isinstance(event, ev.BlockFreed) and self.forgets:
                self.slots[event.block_id] = [POISON] * self.size

    def seen(self, end: int) -> range:
        return range(max(0, end - self.window), end)


def blocks_add_up(kv: Any, holders: Any) -> None:
    """Each reference is a table's entry; what is gone is in front, out of sight, and all of it that has a name at least."""
    named = Counter(block_id for seq in holders for block_id in seq.block_table)
    del named[GONE]
    assert [block.ref_count for block in kv.blocks] == [named[i] for i in range(kv.num_blocks)]
    assert kv.num_free == kv.num_blocks - len(named)
    for seq in holders:
        gone = seq.block_table.count(GONE)
        assert GONE not in seq.block_table[gone:]
        assert len(seq.block_table) == -(-seq.num_computed_tokens // kv.block_size)
        assert gone * kv.block_size <= max(0, seq.num_computed_tokens - kv.window + 1)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 1 << 30), num_blocks=st.integers(14, 30), block_size=st.integers(1, 4), k=st.integers(0, 5),
    budget=st.integers(4, 30), window=st.integers(2, 9), caching=st.booleans(),
)  # fmt: skip
def test_nothing_in_sight_is_given_away(
    seed: int, num_blocks: int, block_size: int, k: int, budget: int, window: int, caching: bool
) -> None:
    """Chunks, preemption, shared prefixes, drafts and aborts, over overlapped steps; the device checks what it reads."""
    kv = (SlidingPrefixCachingBlockManager if caching else SlidingBlockManager)(num_blocks, block_size, window=window)
    loop = Loop(kv, SlidingDevice(kv), random.Random(seed), k, budget, blocks_add_up)
    loop.run(longest=min(40, num_blocks * block_size))


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1 << 30), block_size=st.integers(1, 4), k=st.integers(0, 5), budget=st.integers(4, 20),
    window=st.integers(2, 20), caching=st.booleans(), collides=st.booleans(),
)  # fmt: skip
def test_texts_longer_than_the_pool(
    seed: int, block_size: int, k: int, budget: int, window: int, caching: bool, collides: bool
) -> None:
    """`most_held` blocks are enough for texts of any length to end, also where hashes of different blocks are the same."""
    kind = SlidingPrefixCachingBlockManager if caching else SlidingBlockManager
    kv = kind(most_held(window, budget, block_size), block_size, window=window)
    with pytest.MonkeyPatch.context() as patch:
        if collides:
            patch.setattr(prefix_cache, "compute_hash", alike)
        Loop(kv, SlidingDevice(kv), random.Random(seed), k, budget, blocks_add_up).run(longest=90)


@pytest.mark.parametrize(
    ("window", "step", "block_size"), [(9, 3, 4), (9, 3, 1), (10, 4, 4), (2, 5, 4), (5, 4, 3), (3, 2, 8)]
)
def test_the_most_that_one_sequence_holds(window: int, step: int, block_size: int) -> None:
    """A step is under way, and the next is reserved: with the worst beginning they take as much as is said, and never more."""
    found = []
    for begun in range(1, 3 * (window + block_size)):
        kv = SlidingPrefixCachingBlockManager(99, block_size, window=window)
        seq = make_seq(begun + 2 * step)
        assert kv.allocate_slots(seq, begun)
        seq.start()
        seq.num_computed_tokens = begun
        kv.cache_blocks(seq)
        for _ in range(2):
            assert kv.allocate_slots(seq, step)
            seq.num_computed_tokens += step
        found.append(kv.num_used)
    assert max(found) == most_held(window, step, block_size)


def test_who_stands_where() -> None:
    """Every layer must slide, and a learner's own manager stays what it is."""
    from types import SimpleNamespace

    every, some = (SimpleNamespace(num_hidden_layers=2, sliding_window=8, layer_types=kinds) for kinds in (
        None, ["sliding_attention", "full_attention"]))  # fmt: skip
    made: Any = sliding(PrefixCachingBlockManager, every)(10, 4)
    assert type(made) is SlidingPrefixCachingBlockManager and made.window == 8
    assert sliding(BlockManager, some) is BlockManager
    assert sliding(BlockManager, SimpleNamespace(num_hidden_layers=2)) is BlockManager

    class Own(BlockManager):
        pass

    assert sliding(Own, every) is Own


def test_the_engine_gives_blocks_back() -> None:
    """A model that slides, in a cache for less than `max_model_len` tokens of one text; a draft now and then."""
    path = tiny_checkpoint("mistral", sliding_window=12)
    load = answered(path, mixed_requests("greedy", 4))
    fields: dict[str, Any] = {
        "block_size": 4, "num_kv_blocks": 12, "max_model_len": 88, "max_num_seqs": 4, "max_num_batched_tokens": 16,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }  # fmt: skip
    engine = make_engine(EngineConfig(model=str(path), milestone="m6", device="cpu", use_tqdm=False, **fields))
    assert isinstance(engine.scheduler.kv, SlidingBlockManager)
    passed: list[ev.BlockPassed] = []
    engine.scheduler.kv.events.subscribe(
        lambda events: passed.extend(e for e in events if isinstance(e, ev.BlockPassed)),
        ev.Snapshot(12, 4, 4, 16, 0, (), ()),
    )
    load.check(serve(engine, load.requests))
    assert passed
