"""x6.2: the hash before a first block, for each generation of weights."""

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
    """Numbers whose lowest bytes are equal, the salts of 64 bits, and no salt."""
    salts = 0, 1, 2, 257, 2**16 + 1, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1, SALT, SALT + 1, SALT + 2**32
    generations = 0, 1, 2, 3, 4, 255, 256, 257, 2**16 + 1, 2**32 + 1
    roots: dict[int, tuple[int, int]] = {}
    for salt in salts:
        for generation in generations:
            root = generation_root(salt, generation)
            assert 0 <= root < 2**64, f"salt {salt}, generation {generation}: a hash has 64 bits, unsigned"
            twin = roots.setdefault(root, (salt, generation))
            says = f"salt {salt} in generation {generation} has the root of salt {twin[0]} in generation {twin[1]}: they would find each other's blocks"
            assert twin == (salt, generation), says
            if not generation:
                assert root == salt, f"salt {salt}, generation 0: the hash of the salt alone, as it is, not {root}"
            else:
                expected = xxhash.xxh64_intdigest(struct.pack("<QQ", generation, salt))
                assert root == expected, f"salt {salt}, generation {generation}: not the hash of their 16 bytes"


def test_it_stands_before_the_first_block() -> None:
    tokens = np.arange(16, dtype=np.int32)
    names = [compute_hash(tokens, generation_root(0, generation)) for generation in range(3)]
    assert names[0] == compute_hash(tokens, 0), "without an update blocks have the names that they always had"
    assert len({*names}) == 3, "the same tokens under other weights are another block"
