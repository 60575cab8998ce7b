"""Blocks by the hash of their prefix: what is found, what is published, what is forgotten."""

from typing import ClassVar

import numpy as np
import pytest
import xxhash

from folovllm.cache import prefix_cache
from folovllm.cache.block_manager import Block
from folovllm.cache.prefix_cache import ROOT, PrefixCache, PrefixCachingBlockManager, compute_hash
from folovllm.request import Sequence, SequenceStatus
from tests.sequences import make_seq as sequence
from tests.tiny import worked_case

B = 4


def admit(manager: PrefixCachingBlockManager, seq: Sequence, count: int | None = None) -> int:
    """Match, reserve, compute and publish `count` tokens (all, if left out); returns how many were found."""
    manager.get_computed_blocks(seq)
    found = seq.num_computed_tokens
    count = seq.num_uncomputed_tokens if count is None else count
    assert manager.allocate_slots(seq, count)
    seq.start()
    seq.num_computed_tokens += count
    manager.cache_blocks(seq)
    return found


def leave(manager: PrefixCachingBlockManager, seq: Sequence) -> None:
    seq.finish(SequenceStatus.FINISHED_STOPPED)
    manager.free(seq)


class TestComputeHash:
    tokens = np.array([1, 2, 3, 4], np.int32)

    def test_a_worked_case(self) -> None:
        """The prefix is 2 ** 32 + 5, so its bytes are 5 0 0 0 1 0 0 0; the tokens are 2 and 1, of four bytes each."""
        data = bytes([5, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0])
        got = compute_hash(np.array([2, 1], np.int32), 2**32 + 5)
        says = f"xxh64 of 16 bytes, those of the prefix and then those of the tokens: {list(data)}"
        worked_case("m5.1 compute_hash", got, xxhash.xxh64_intdigest(data), says)

    def test_takes_prefixes_of_all_64_bits(self) -> None:
        assert 0 <= compute_hash(self.tokens, 2**64 - 1) < 2**64, "64 bits, unsigned, also for the largest prefix"
        assert compute_hash(self.tokens, 5) != compute_hash(self.tokens, 5 + 2**32), "all 64 bits of the prefix count"

    def test_takes_views(self) -> None:
        view, alone = np.arange(8, dtype=np.int32)[2:6], np.arange(2, 6, dtype=np.int32)
        assert compute_hash(view, 0) == compute_hash(alone, 0), "a view has the bytes of its own tokens alone"


class Chain:
    """A `PrefixCache` with some blocks in it, put there without its own `cache_blocks`."""

    def __init__(self, tokens: list[int]) -> None:
        self.cache = PrefixCache(B)
        self.blocks: list[Block] = []
        prefix = parent = 0
        for i in range(len(tokens) // B):
            block = np.array(tokens[i * B : (i + 1) * B], np.int32)
            prefix = xxhash.xxh64_intdigest(prefix.to_bytes(8, "little") + block.tobytes())
            block = Block(10 + i, hash=prefix, token_ids=block.tobytes(), serial=100 + i, parent=parent)
            parent = block.serial
            self.cache._by_hash[prefix] = block
            self.blocks.append(block)

    def found(self, tokens: list[int]) -> list[int]:
        return [block.block_id for block in self.cache.longest_cached_prefix(sequence(tokens))]


class TestLongestCachedPrefix:
    tokens: ClassVar[list[int]] = list(range(50, 62))  # three blocks: 10, 11, 12

    def test_a_worked_case(self) -> None:
        """Blocks 10, 11 and 12 of four tokens each are cached, in a chain."""
        chain, more = Chain(self.tokens), [*self.tokens, 1]
        got = {"their 12 tokens and one more": chain.found(more), "their 12 tokens": chain.found(self.tokens)}
        missing, other, stranger = Chain(self.tokens), Chain(self.tokens), Chain(self.tokens)
        del missing.cache._by_hash[missing.blocks[1].hash or 0]
        other.blocks[1].token_ids = bytes(16)
        stranger.blocks[1].parent = 999
        got |= {
            "13 tokens, block 11 is gone": missing.found(more),
            "13 tokens, block 11 has the right hash and other tokens": other.found(more),
            "13 tokens, block 11 has followed another block": stranger.found(more),
        }
        says = "whole blocks from the start until the first miss; one token at least is left to compute"
        answers = [[10, 11, 12], [10, 11], [10], [10], [10]]
        worked_case("m5.1 longest_cached_prefix", got, dict(zip(got, answers, strict=True)), says)

    def test_finds_whole_blocks_from_the_start_and_leaves_one_token(self) -> None:
        chain = Chain(self.tokens)
        for count, found in ((13, [10, 11, 12]), (12, [10, 11]), (9, [10, 11]), (7, [10]), (5, [10]), (4, []), (3, [])):
            says = f"{count} tokens: its full blocks, in order, but for one token at least, whose logits give the next"
            assert chain.found([*self.tokens, 1][:count]) == found, says

    def test_stops_at_the_first_difference(self) -> None:
        chain = Chain(self.tokens)
        other = [*self.tokens, 1]
        other[5] += 1
        assert chain.found(other) == [10], "token 5 is another: block 1 and all after it are not found"
        other[0] += 1
        assert chain.found(other) == [], "token 0 is another: nothing is found"

    def test_a_miss_ends_it_even_where_hashes_collide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A hash that knows nothing of the prefix: block 10, the first of another prompt, has the name of block 1 here."""
        monkeypatch.setattr(prefix_cache, "compute_hash", lambda tokens, prefix: int(tokens[0]))
        chain = Chain(self.tokens)
        chain.cache._by_hash = {50: chain.blocks[0]}
        assert chain.found([1, 1, 1, 1, *self.tokens[:4], 1]) == [], "block 0 is a miss, and a miss ends the search"

    def test_generated_tokens_count_too(self) -> None:
        """As after a preemption: a prompt of 5 tokens, and 8 of the answer."""
        chain, seq = Chain(self.tokens), sequence(self.tokens[:5])
        for token in [*self.tokens[5:], 1]:
            seq.append_token(token)
        found = [block.block_id for block in chain.cache.longest_cached_prefix(seq)]
        assert found == [10, 11, 12], "13 tokens have three full blocks, whichever of them are the prompt's"

    def test_a_salt_keeps_tenants_apart(self) -> None:
        chain, salted = Chain(self.tokens), sequence([*self.tokens, 1], salt="b")
        assert chain.cache.longest_cached_prefix(salted) == [], (
            "the blocks were published without a salt: who asks with one must not learn that they are there (`self._hash`)"
        )

    def test_a_block_that_somebody_holds_is_found(self) -> None:
        chain = Chain(self.tokens)
        chain.blocks[0].ref_count, chain.blocks[1].ref_count = 2, 1
        assert chain.found([*self.tokens, 1]) == [10, 11, 12], "sequences that run share blocks with whoever comes"

    def test_a_look_changes_nothing(self) -> None:
        """`get_computed_blocks` does what a hit needs, and a sequence may be looked up at many steps before it is admitted."""
        chain, seq = Chain(self.tokens), sequence([*self.tokens[:8], 1, 1, 1, 1, 1])
        chain.blocks[2].hash = chain.cache._hash(seq, 2)
        chain.cache._by_hash[chain.blocks[2].hash] = chain.blocks[2]  # its tokens are others: a collision
        before = dict(chain.cache._by_hash)
        for _ in range(2):
            assert chain.cache.longest_cached_prefix(seq) == chain.blocks[:2], "the same, however often it is asked"
        assert (chain.cache.serials(seq), seq.block_table) == ([], []), "`get_computed_blocks` notes both of a hit"
        assert [block.ref_count for block in chain.blocks] == [0, 0, 0], "`adopt` counts who holds a block"
        assert chain.cache._by_hash == before, "a name stays with its block, whoever it does not fit"

    def test_each_block_is_hashed_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Counts the calls of `compute_hash`. A sequence that waits is looked up at each step."""
        chain, seq, calls = Chain(self.tokens), sequence([*self.tokens, 1]), list[int]()
        right = prefix_cache.compute_hash
        monkeypatch.setattr(prefix_cache, "compute_hash", lambda *args: calls.append(1) or right(*args))
        for _ in range(5):
            assert len(chain.cache.longest_cached_prefix(seq)) == 3, "three blocks of the sequence are cached"
        assert len(calls) == 3, f"three blocks were hashed {len(calls)} times: `self._hash` remembers a hash"

    def test_a_block_that_followed_another_block_is_no_hit(self) -> None:
        chain = Chain(self.tokens)
        chain.blocks[1].parent = 999
        assert chain.found([*self.tokens, 1]) == [10], "block 11 was computed after another block than 10"
        chain.blocks[0].parent = 999
        assert chain.found([*self.tokens, 1]) == [], "block 10 was not computed at the beginning of a prompt"


def make_blocks(*ids: int) -> list[Block]:
    return [Block(i) for i in ids]


class Forgetful(PrefixCache):
    """With an `evict` of its own, so that publishing can be tested by itself."""

    def evict(self, block: Block) -> None:
        self._by_hash = {hash_: other for hash_, other in self._by_hash.items() if other is not block}
        block.hash = None


class TestPublish:
    tokens: ClassVar[list[int]] = list(range(50, 62))

    def test_a_worked_case(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody published blocks 7 and 8. A twin has blocks 17, 18, 19, of which the first two have the same tokens."""

        def named(cache: PrefixCache) -> list[int]:
            return sorted(block.block_id for block in cache._by_hash.values())

        cache, orphaned, ones, twos = PrefixCache(B), Forgetful(B), make_blocks(7, 8), make_blocks(17, 18, 19)
        cache.cache_blocks(sequence(self.tokens[:8]), ones)
        cache.cache_blocks(sequence(self.tokens), twos)
        got = {"blocks with a name": named(cache), "19 follows 8": twos[2].parent == ones[1].serial}
        gone, again = make_blocks(7, 8), make_blocks(17, 18)
        orphaned.cache_blocks(sequence(self.tokens[:8]), gone)
        orphaned.evict(gone[0])
        orphaned.cache_blocks(sequence(self.tokens[:8]), again)
        got["the same, with block 7 forgotten before"] = named(orphaned)
        monkeypatch.setattr(prefix_cache, "compute_hash", lambda tokens, prefix: 42)
        collision, other = PrefixCache(B), sequence([1] * 8)
        collision.cache_blocks(sequence(self.tokens[:4]), make_blocks(7))
        ended = "no error"
        try:
            collision.cache_blocks(other, make_blocks(17, 18))
        except IndexError as error:
            ended = f"IndexError: {error}"
        got["other tokens, and all hashes are 42"] = [named(collision), len(collision.serials(other)), ended]
        says = "twins stay nameless and what follows them follows the first; 8 without 7 gives way; a collision ends it"
        worked_case("m5.3", got, dict(zip(got, [[7, 8, 19], True, [17, 18], [[7], 0, "no error"]], strict=True)), says)

    def test_names_full_blocks_in_a_chain(self) -> None:
        cache, seq, blocks = PrefixCache(B), sequence(self.tokens), make_blocks(7, 8, 9)
        cache.cache_blocks(seq, blocks)
        assert len(cache) == 3, "three full blocks have a name"
        assert cache.serials(seq) == [b.serial for b in blocks], "the sequence's serials are those of its blocks"
        assert [b.parent for b in blocks] == [ROOT, blocks[0].serial, blocks[1].serial], "each follows that before it"
        assert len(set(cache.serials(seq))) == 3 and ROOT not in cache.serials(seq), "each block has its own serial"
        first, second = (np.array(self.tokens[i * B : (i + 1) * B], np.int32) for i in range(2))
        assert blocks[0].token_ids == first.tobytes(), "block 0 notes its tokens"
        assert blocks[0].hash == compute_hash(first, 0), "block 0 is named after its tokens"
        assert blocks[1].hash == compute_hash(second, blocks[0].hash or 0), "block 1 after its own and the one before"

    def test_a_twin_keeps_its_own_blocks(self) -> None:
        """Attention of this very step writes to them."""
        cache, ones, twos = PrefixCache(B), make_blocks(7, 8), make_blocks(17, 18)
        cache.cache_blocks(sequence(self.tokens[:8]), ones)
        twin, own = sequence(self.tokens[:8]), [*twos]
        twin.block_table.extend([17, 18])
        cache.cache_blocks(twin, twos)
        table = [block.block_id for block in twos], twin.block_table
        assert table == ([17, 18], [17, 18]), f"a running sequence is never moved: blocks 17 and 18 became {table}"
        assert all(a is b and b.hash is None for a, b in zip(own, twos, strict=True)), "17 and 18 stay nameless"

    def test_goes_on_where_it_left_off(self) -> None:
        cache, seq, blocks = PrefixCache(B), sequence(self.tokens), make_blocks(7, 8, 9)
        cache.cache_blocks(seq, blocks[:1])
        serial = blocks[0].serial
        cache.cache_blocks(seq, blocks)
        assert blocks[0].serial == serial, "what was published is not published again"
        assert blocks[1].parent == serial, "the next block follows it"
        assert len(cache) == 3, "three blocks have a name"
        assert cache.serials(seq) == [b.serial for b in blocks], "one serial a block, however many calls it took"

    def test_what_lost_its_name_does_not_get_it_again(self) -> None:
        """New weights came while the sequence ran: blocks 7 and 8 hold K/V of the old ones."""
        cache, seq, blocks = Forgetful(B), sequence(self.tokens), make_blocks(7, 8, 9)
        cache.cache_blocks(seq, blocks[:2])
        cache.reset()
        cache.cache_blocks(seq, blocks)
        assert [b.hash for b in blocks[:2]] == [None, None], "7 and 8 were published and forgotten: only 9 is new"

    def test_what_follows_a_collision_is_not_published_as_if_it_followed_what_came_before(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A hash that knows only the sum of a block's tokens: 4 3 2 1 collides with 1 2 3 4."""
        monkeypatch.setattr(prefix_cache, "compute_hash", lambda tokens, prefix: int(tokens.sum()))
        cache, start, end = PrefixCache(B), self.tokens[:4], [9, 9, 9, 9]
        ones, twos, seq = make_blocks(7, 8), make_blocks(17, 18, 19), sequence([*start, 4, 3, 2, 1, *end])
        cache.cache_blocks(sequence([*start, 1, 2, 3, 4]), ones)
        cache.cache_blocks(seq, twos)
        assert all(b.hash is None for b in twos), (
            f"17 is a twin of 7, 18 collides with 8, and 19 must have no name. Yours follows {twos[2].parent}, and 7 is "
            f"{ones[0].serial}: a prompt of the tokens of 17 and 19 would be served K/V that was computed after those of 18, too"
        )
        assert cache.serials(seq) == [ones[0].serial], "one block of the second counts as published, by its twin"

    def test_other_tokens_after_another_block_are_no_collision(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(prefix_cache, "compute_hash", lambda tokens, prefix: int(tokens.sum()))
        cache, blocks = Forgetful(B), make_blocks(7, 8, 17, 18)
        cache.cache_blocks(sequence([1, 1, 1, 1, 1, 2, 3, 4]), blocks[:2])
        cache.cache_blocks(sequence([2, 2, 2, 2, 4, 3, 2, 1]), blocks[2:])
        assert cache._by_hash[10] is blocks[3], "8 has the hash of 18, but follows another block: the name goes to 18"


class TestEvict:
    """By hand, without the cache's other methods."""

    def test_a_worked_case(self) -> None:
        """Blocks 10 and 11 have names. Block 11 is evicted, then block 3, which has none."""
        chain, nameless = Chain(list(range(8))), Block(3)
        block = chain.blocks[1]
        chain.cache.evict(block)
        chain.cache.evict(nameless)
        got = {
            "blocks with a name": [other.block_id for other in chain.cache._by_hash.values()],
            "hash, token_ids, serial, parent": [block.hash, list(block.token_ids), block.serial, block.parent],
            "evictions": chain.cache.stats.evictions,
        }
        says = "11 is as new, and its name leads nowhere; a block without a name is no eviction"
        worked_case("m5.4 evict", got, dict(zip(got, [[10], [None, [], 0, 0], 1], strict=True)), says)

    def test_a_hash_of_zero_is_a_name(self) -> None:
        cache, block = PrefixCache(B), Block(3, hash=0, token_ids=bytes(16), serial=5)
        cache._by_hash[0] = block
        cache.evict(block)
        assert len(cache) == 0 and block.hash is None, "only None means that a block has no name"

    def test_each_is_counted(self) -> None:
        chain = Chain(list(range(8)))
        for block in chain.blocks:
            chain.cache.evict(block)
        assert chain.cache.stats.evictions == len(chain.blocks), "one more for each block that had a name"

    def test_whoever_holds_the_block_goes_on_holding_it(self) -> None:
        """`_take` has counted its new holder before the old name goes."""
        chain = Chain(list(range(8)))
        chain.blocks[1].ref_count = 1
        chain.cache.evict(chain.blocks[1])
        assert chain.blocks[1].ref_count == 1, "a name is forgotten, and not a holder: else two get the same block"

    def test_a_second_time_is_once_too_often(self) -> None:
        chain = Chain(list(range(8)))
        block = chain.blocks[1]
        name = block.hash
        chain.cache.evict(block)
        chain.cache._by_hash[name or 0] = heir = Block(99, hash=name)  # computed again, in another block
        chain.cache.evict(block)
        assert chain.cache._by_hash[name or 0] is heir, "the name belongs to another block now, and stays"
        assert chain.cache.stats.evictions == 1, "the second time nothing was evicted"

    def test_a_block_taken_for_something_else_is_forgotten(self) -> None:
        manager = PrefixCachingBlockManager(2, B)
        chain = Chain(list(range(8)))
        manager.prefix_cache, manager.blocks[0].hash = chain.cache, chain.blocks[0].hash
        chain.cache._by_hash[chain.blocks[0].hash or 0] = manager.blocks[0]
        assert manager._take() == 0 and manager.blocks[0].hash is None, "block 0 is taken and has no name any more"
        assert len(chain.cache) == 1, "only block 11 is left to be found"


class TestAdopt:
    """Blocks by hand: what counts is who holds them."""

    def test_a_worked_case(self) -> None:
        manager = PrefixCachingBlockManager(4, B)
        manager.adopt(manager.blocks[2])
        manager.adopt(manager.blocks[2])
        got = {"holders": manager.blocks[2].ref_count}
        got["free"] = [manager._free.popleft().block_id for _ in range(manager.num_free)]
        says = "two sequences found block 2: two hold it, and nobody else can get it"
        worked_case("m5.4 adopt", got, {"holders": 2, "free": [0, 1, 3]}, says)

    def test_a_shared_block_is_free_when_the_last_one_leaves(self) -> None:
        manager = PrefixCachingBlockManager(4, B)
        seqs = [sequence(list(range(5))) for _ in range(2)]
        for seq in seqs:
            manager.adopt(manager.blocks[2])
            seq.block_table.append(2)
        for seq, num_free in zip(seqs, (3, 4), strict=True):
            manager.deallocate(seq)
            assert manager.num_free == num_free, "with one of two holders gone it is held, with both it is free"

    def test_finding_leaves_the_name(self) -> None:
        manager = PrefixCachingBlockManager(4, B)
        manager.blocks[1].hash = 42
        manager.adopt(manager.blocks[1])
        assert manager.blocks[1].hash == 42, "others can go on finding it"


class TestManager:
    def test_a_hit_that_cannot_be_admitted_is_given_back(self) -> None:
        manager = PrefixCachingBlockManager(4, B)
        seq = sequence(list(range(5)))
        admit(manager, seq)
        leave(manager, seq)
        admit(manager, sequence([9] * 8))
        late = sequence([*range(5), *[1] * 8])
        manager.get_computed_blocks(late)
        assert late.num_computed_tokens == 4
        assert not manager.allocate_slots(late, late.num_uncomputed_tokens)
        manager.free(late)
        assert (late.num_computed_tokens, late.block_table, manager.prefix_cache.serials(late)) == (0, [], [])
        assert manager.num_free == 2

    def test_a_lone_sequence_may_have_the_whole_pool_even_after_a_hit(self) -> None:
        manager = PrefixCachingBlockManager(200, B)
        seq = sequence(list(range(9)))
        admit(manager, seq)
        leave(manager, seq)
        assert admit(manager, sequence([*range(9), *[1] * (800 - 9)])) == 8

    def test_reset_forgets_all_and_what_runs_goes_on(self) -> None:
        manager, seq = PrefixCachingBlockManager(20, B), sequence(list(range(8)))
        admit(manager, seq)
        manager.prefix_cache.reset()
        assert len(manager.prefix_cache) == 0 and admit(manager, sequence([*range(8), 1])) == 0
        for token in (70, 71, 72, 73):
            seq.append_token(token)
            assert manager.allocate_slots(seq, 1)
            seq.num_computed_tokens += 1
            manager.cache_blocks(seq)
        assert admit(manager, sequence([*range(8), 70, 71, 72, 73, 5])) == 8  # its third block follows nothing known
