"""What decides about K/V that moves, apart from all that moves it: what a block is called, whether it is worth bringing, what is lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import xxhash


def block_key(block_hash: int, model: bytes, version: bytes, dtype: str, block_size: int) -> bytes:
    """The name of a block's K/V outside of the device: equal for two blocks only if their bytes may stand for each other.

    `block_hash` says which tokens, and whose: its chain goes back over all blocks before to the tenant's salt (M5). It does not say of which
    model, so the key has what K/V depend on besides. Each field is preceded by its length, or ("ab", "c") and ("a", "bc") would be
    one key.

    Args:
        block_hash: 64 bits, unsigned (`compute_hash`).
        model: a digest of the configuration and the weights. version: which weights of that model, b"" for those of its start.
        dtype: of the numbers in the cache. block_size: tokens a block.

    Returns:
        16 bytes: `xxhash.xxh3_128_digest` over the five fields, in this order, each after its length in bytes as 4 bytes. Numbers
        are little endian, `block_hash` in 8 bytes and `block_size` in 4; text is UTF-8.

    Example:
        The fields of `block_key(1, b"m", b"", "bf16", 16)` are 8, 1, 0, 4 and 4 bytes long, so 37 bytes are hashed.
    """
    fields = block_hash.to_bytes(8, "little"), model, version, dtype.encode(), block_size.to_bytes(4, "little")
    return xxhash.xxh3_128_digest(b"".join(len(field).to_bytes(4, "little") + field for field in fields))


def blocks_to_load(
    places: Sequence[str | None],
    first: int,
    block_bytes: int,
    block_size: int,
    rates: Mapping[str, float],
    compute_rate: float,
) -> range:
    """Which blocks of a prompt to bring back, the others being computed.

    A block saves the time to compute its tokens and costs the time of its bytes on the link. K/V depend on all tokens before, so what is
    brought begins behind the device's own blocks and has no gap: of all such runs the one that saves most, of equal ones the shortest, and
    none if none saves anything. A slow block may be worth it for the fast ones behind it.

    Args:
        places: where each full block of the prompt is ("host", "disk", ...), None: nowhere. first: how many the device has.
        block_bytes: bytes a block. block_size: tokens a block.
        rates: bytes a second from each place. compute_rate: tokens a second that the device computes.

    Returns:
        Block numbers `first` to `last`, perhaps empty: `range(first, last)`.

    Example:
        A block of 16 tokens and 2 MB takes 1 ms to compute (16,000 tokens a second), 0.1 ms from the host (20 GB/s), and 2 ms from
        the disk (1 GB/s). Of host, host, disk, None with the first on the device, `range(1, 2)`: block 1 saves 0.9 ms, and block 2 would
        lose 1 ms. With two more blocks on the host in place of None, `range(1, 5)`: -1 + 0.9 + 0.9 is a gain.
    """
    best, last, saved = 0.0, first, 0.0
    for i in range(first, len(places)):
        place = places[i]
        if place is None:
            break
        saved += block_size / compute_rate - block_bytes / rates[place]
        if saved > best:
            best, last = saved, i + 1
    return range(first, last)


def requests_to_recompute(
    tables: Mapping[int, Sequence[int]], num_computed: Mapping[int, int], lost: Collection[int], block_size: int
) -> dict[int, int]:
    """Which requests must be computed again after blocks were lost (a peer died, a load failed), and from which token on.

    A token's K/V is of no use without that of all tokens before it: so from the first lost block on, even where later ones have come.
    Blocks behind the computed tokens hold nothing yet and lose nothing. A shared block is lost for all who share it.

    Args:
        tables: each request's blocks in order. num_computed: how many of its tokens are in them, by the same numbers.
        lost: ids of the blocks. block_size: tokens a block.

    Returns:
        By request, the first token to compute, for those that lose some.

    Example:
        Blocks of 4 tokens, and block 7 is lost: request 1 with blocks [5, 7, 8] and 10 tokens begins again at 4; request 2 with [5, 6] loses
        nothing; nor does request 3 with [5, 7] and 4 tokens, which are all in block 5.
    """
    begin = {}
    for request, table in tables.items():
        places = [i * block_size for i, block in enumerate(table) if block in lost]
        if places and places[0] < num_computed[request]:
            begin[request] = places[0]
    return begin
