"""What two electives are about: an exercise of each."""

from folovllm.pool import Pool


def drain(pool: Pool) -> list[int]:
    """Take all that is free."""
    return [pool.take() for _ in range(len(pool.free))]


def twins(things: list[int]) -> list[int]:
    """Each thing twice, side by side."""
    return [thing for thing in things for _ in range(2)]
