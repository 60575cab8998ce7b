"""x7.1 to x7.3: what a block is called outside of the device, whether it is worth bringing back, and what is lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import xxhash

from folovllm.electives.kv_transfer.plan import block_key, blocks_to_load, requests_to_recompute
from tests.tiny import worked_case


class TestBlockKey:
    def test_a_worked_case(self) -> None:
        """Five fields, each behind its length."""
        start = "08000000 0100000000000000  01000000 6d  00000000  04000000 62663136  04000000 10000000"
        updated = start.replace("00000000  04", "01000000 02  04")
        got = {
            "at the start": block_key(1, b"m", b"", "bf16", 16).hex(),
            "after an update": block_key(1, b"m", b"\x02", "bf16", 16).hex(),
        }
        expected = {
            case: xxhash.xxh3_128_hexdigest(bytes.fromhex(text))
            for case, text in zip(got, (start, updated), strict=True)
        }
        says = f"xxh3_128 of the 37 bytes {start}; after an update of 38, for the version has one"
        worked_case("x7.1", got, expected, says)

    def test_each_field_makes_another_key(self) -> None:
        """Also where their bytes, joined, would be the same, and where hashes differ in their highest bits alone."""
        hashes = 0, 1, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1
        texts = b"", b"a", b"ab", b"b", b"abc", b"bc", b"c"
        keys: dict[bytes, tuple[Any, ...]] = {}
        for case in itertools.product(hashes, texts, texts, ("bfloat16", "float16", "int8"), (16, 32, 272)):
            key = block_key(*case)
            twin = keys.setdefault(key, case)
            assert twin == case, f"{case} has the key of {twin}: one of them would get the K/V of the other"

    def test_it_is_16_bytes_and_the_same_in_each_process(self) -> None:
        """All of it follows from the arguments: a restarted server finds its files."""
        for case in ((2**64 - 1, b"model", b"v1", "größe", 2**31), (0, b"", b"", "", 0)):
            text, size = case[3].encode("utf-8"), case[4].to_bytes(4, "little")
            fields = (case[0].to_bytes(8, "little"), case[1], case[2], text, size)
            expected = xxhash.xxh3_128_digest(b"".join(len(f).to_bytes(4, "little") + f for f in fields))
            key = block_key(*case)
            assert isinstance(key, bytes) and len(key) == 16, f"a key is 16 bytes, not {key!r}"
            assert key == expected, f"{case}: not the hash of the fields {fields}, each behind its length"


RATES = {"host": 4.0, "disk": 0.5}  # bytes a second; with 4 bytes a block: 1 second and 8 seconds


def load(places: Sequence[str | None], first: int = 0, block_seconds: float = 2.0) -> list[int]:
    """Where the run begins and ends. A block takes `block_seconds` to compute, 1 from the host and 8 from the disk."""
    found = blocks_to_load(places, first, 4, 8, RATES, 8 / block_seconds)
    assert isinstance(found, range) and found.step == 1, f"the answer is a range of block numbers, not {found!r}"
    return [found.start, found.stop]


class TestBlocksToLoad:
    def test_a_worked_case(self) -> None:
        def milliseconds(*places: str | None) -> list[int]:
            found = blocks_to_load(places, 1, 2_000_000, 16, {"host": 20e9, "disk": 1e9}, 16_000)
            return [found.start, found.stop]

        got = {
            "host, host, disk, None": milliseconds("host", "host", "disk", None),
            "host, host, disk, host, host": milliseconds("host", "host", "disk", "host", "host"),
            "host, disk": milliseconds("host", "disk"),
        }
        expected = {
            "host, host, disk, None": [1, 2],
            "host, host, disk, host, host": [1, 5],
            "host, disk": [1, 1],
        }
        says = (
            "a block takes 1 ms to compute, 0.1 ms from the host, 2 ms from the disk. Block 0 is on the device. First: 0.9, then "
            "-0.1. Second: 0.9, -0.1, 0.8, 1.7. Third: -1, so nothing (begin and end of each range)"
        )
        worked_case("x7.2", got, expected, says)

    def test_what_the_device_has_is_not_brought_again(self) -> None:
        places = ["host"] * 4
        for first in range(5):
            assert load(places, first) == [first, 4], (
                f"the device has {first} of 4 blocks: bring those behind them, no others"
            )

    def test_a_gap_ends_the_run(self) -> None:
        assert load(["host", None, "host", "host"]) == [0, 1], (
            "what lies behind a gap depends on tokens that are not there"
        )
        assert load([None, "host", "host"]) == [0, 0], "the first block is nowhere, so nothing can be brought"

    def test_of_equal_runs_the_shortest(self) -> None:
        assert load(["host", "host"], block_seconds=1.0) == [0, 0], "a run that saves nothing is not brought"
        places = ["host", "disk", *["host"] * 6, None]  # 1, then -5, and up to 1 again
        says = "blocks 0 to 7 save as much as block 0 alone: the shorter run leaves the link to others"
        assert load(places) == [0, 1], says

    def test_a_slow_block_for_the_fast_ones_behind_it(self) -> None:
        places = ["disk", *["host"] * 7]  # -6, and 1 for each
        assert load(places) == [0, 8], (
            "the disk costs 6 seconds more than computing, and seven blocks of the host save 7"
        )
        assert load(places[:7]) == [0, 0], "six blocks of the host save just what the disk costs, which is no gain"

    def test_nothing_to_bring(self) -> None:
        assert load([]) == [0, 0], "a prompt without a full block brings nothing"
        assert load(["host", "host"], 2) == [2, 2], "all blocks are on the device: the range is empty, behind them"
        assert load(["disk", "disk"]) == [0, 0], "a disk that is slower than computing brings nothing"

    @pytest.mark.parametrize("seed", range(20))
    def test_no_run_saves_more(self, seed: int) -> None:
        """Against all runs, in exact fractions."""
        chance = random.Random(seed)
        for _ in range(100):
            places = chance.choices(["host", "disk", None], weights=(6, 2, 1), k=chance.randrange(12))
            first, seconds = chance.randrange(len(places) + 1), chance.choice([0.5, 1.0, 2.0, 4.0, 16.0])
            costs = {"host": Fraction(1), "disk": Fraction(8)}
            best, last, saved = Fraction(0), first, Fraction(0)
            for end in range(first + 1, len(places) + 1):
                if (place := places[end - 1]) is None:
                    break
                saved += Fraction(seconds) - costs[place]
                if saved > best:
                    best, last = saved, end
            says = f"of {places}, {first} on the device, a block computed in {seconds} s: {first} to {last} saves most, {best} s"
            assert load(places, first, seconds) == [first, last], says


class TestRequestsToRecompute:
    def test_a_worked_case(self) -> None:
        tables, computed = {1: [5, 7, 8], 2: [5, 6], 3: [5, 7]}, {1: 10, 2: 8, 3: 4}
        found = requests_to_recompute(tables, computed, {7}, 4)
        got = {f"request {request}": found.get(request) for request in tables}
        expected = {"request 1": 4, "request 2": None, "request 3": None}
        says = "block 7 is lost, blocks of 4 tokens: of request 1 it held tokens 4 to 7, of request 3 nothing yet (None: goes on)"
        worked_case("x7.3", got, expected, says)

    def test_from_the_first_lost_block_on(self) -> None:
        """First in the table, whose ids have no order."""
        found = requests_to_recompute({1: [9, 4, 2, 6], 2: [9, 2, 4]}, {1: 16, 2: 12}, {2, 4}, 4)
        says = "request 1 loses its second and third block, request 2 its second and third: both begin again at token 4"
        assert found == {1: 4, 2: 4}, f"{says}, not {found}"

    def test_the_very_first_block(self) -> None:
        found = requests_to_recompute({0: [3, 4], 1: [4]}, {0: 8, 1: 1}, [3], 4)
        assert found == {0: 0}, (
            f"request 0 lost its first block and begins at token 0, request 1 lost nothing: not {found}"
        )

    def test_a_shared_block_is_lost_for_all(self) -> None:
        tables = {request: [1, 2, 10 + request] for request in range(5)}
        found = requests_to_recompute(tables, dict.fromkeys(tables, 12), (2,), 4)
        assert found == dict.fromkeys(tables, 4), f"all five share block 2 and begin again at token 4, not {found}"

    def test_what_holds_nothing_yet(self) -> None:
        tables = {request: [1, 2] for request in range(3)}
        found = requests_to_recompute(tables, {0: 3, 1: 4, 2: 5}, {2}, 4)
        says = "block 2 begins with token 4: with 3 or 4 computed tokens it holds none, with 5 it holds one"
        assert found == {2: 4}, f"{says}; so only request 2 begins again, not {found}"

    def test_nothing_is_lost(self) -> None:
        tables, computed = {1: [5, 6], 2: []}, {1: 8, 2: 0}
        assert requests_to_recompute(tables, computed, set(), 4) == {}, "no block was lost, so all go on"
        assert requests_to_recompute(tables, computed, {7}, 4) == {}, "nobody holds block 7, so all go on"
        assert tables == {1: [5, 6], 2: []}, "the tables that were given have changed"

    @pytest.mark.parametrize("seed", range(10))
    def test_token_by_token(self, seed: int) -> None:
        """The first computed token whose block was lost, of any tables."""
        chance = random.Random(seed)
        for _ in range(50):
            size = chance.choice([1, 3, 16])
            tables = {request: chance.sample(range(12), chance.randrange(6)) for request in chance.sample(range(99), 4)}
            computed = {request: chance.randrange(size * len(table) + 1) for request, table in tables.items()}
            lost = set(chance.sample(range(12), chance.randrange(5)))
            expected = {}
            for request, table in tables.items():
                gone = [token for token in range(computed[request]) if table[token // size] in lost]
                if gone:
                    expected[request] = gone[0]
            found = requests_to_recompute(tables, computed, lost, size)
            says = f"tables {tables}, computed {computed}, lost {lost}, {size} tokens a block: {expected}, not {found}"
            assert found == expected, says
