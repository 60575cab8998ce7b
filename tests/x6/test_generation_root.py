"""x6.2: the hash before a first block, for each generation of weights."""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from folovllm.cache.prefix_cache import compute_hash
from folovllm.electives.rollouts.generation import generation_root
from tests.tiny import worked_case

SALT = 0x1234_5678_9ABC_DEF0


def test_a_worked_case() -> None:
    got = {"generation 0": generation_root(7, 0), "generation 1": generation_root(7, 1)}
    expected = {"generation 0": 7, "generation 1": xxhash.xxh64_intdigest(struct.pack("<QQ", 1, 7))}
    says = "generation 0 has the salt's hash as it is; generation 1 the hash of the bytes 01 00 .. 00 07 00 .. 00, 16 of them"
    worked_case("x6.2", got, expected, says)


def test_no_two_share_a_name() -> None:
    roots = [generation_root(salt, generation) for salt in (0, 1, 2, SALT, SALT + 1) for generation in range(5)]
    assert len({*roots}) == len(roots), "two tenants or two generations would find each other's blocks"
    assert all(0 <= root < 2**64 for root in roots), "a hash has 64 bits, unsigned"


def test_it_stands_before_the_first_block() -> None:
    tokens = np.arange(16, dtype=np.int32)
    names = [compute_hash(tokens, generation_root(0, generation)) for generation in range(3)]
    assert names[0] == compute_hash(tokens, 0), "without an update blocks have the names that they always had"
    assert len({*names}) == 3, "the same tokens under other weights are another block"
