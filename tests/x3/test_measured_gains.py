"""What `tools/measure_speculation.py` says of its rounds: the interval in which a median lies."""

from __future__ import annotations

import math
import random

from tools.measure_speculation import Answers, gains, interval


def chance_outside(num: int, cut: int) -> float:
    """That the median of what `num` values were sampled from lies below value `cut` of them, sorted, or above its mirror image."""
    return 2 * sum(math.comb(num, below) for below in range(cut + 1)) / 2**num


def test_the_interval_is_the_narrowest_that_keeps_its_promise() -> None:
    for num in range(6, 61):
        values = list(map(float, range(num)))
        random.Random(num).shuffle(values)
        low, high = interval(values)
        assert high == num - 1 - low
        assert chance_outside(num, int(low)) <= 0.05 < chance_outside(num, int(low) + 1)


def test_too_few_values_give_the_lowest_and_the_highest() -> None:
    assert all(interval(list(map(float, range(num)))) == (0, num - 1) for num in range(1, 6))


def test_gains() -> None:
    plain, other = ([Answers(seconds, 0.0, []) for seconds in each] for each in ((2.0, 3.0, 4.0), (1.0, 2.0, 8.0)))
    assert gains(plain, other) == "2.000 1.500 0.500, of medians 1.500, median 1.500 (0.500 to 2.000)"
