"""Measures how many threads a product gains from."""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from folovllm.distributed.cores import num_cores

MOST_TIMED = 1 << 22  # weights; of a larger product a part is timed
ROWS = 16  # a small batch, or the end of a prompt
GAIN = 0.8  # more threads must take less than this share of the time
ROUNDS, ROUND = 5, 2e-3  # of each number of threads; seconds


def fastest(outputs: int, inputs: int, dtype: torch.dtype, ranks: int, limit: int) -> int:
    """Double the number of each rank's threads as long as that makes the product of x [T, inputs] and a weight [outputs, inputs] faster.

    Returns the number of all ranks together, at most `limit` and the cores that this process may use.
    """
    limit = min(limit, num_cores())
    best, most = 1, limit // ranks
    if most < 2:
        return min(limit, ranks)
    x = torch.ones(ROWS, inputs, dtype=dtype)
    weight = torch.ones(max(1, min(outputs, MOST_TIMED // inputs)), inputs, dtype=dtype)
    while best < most and is_faster(x, weight, best, more := min(2 * best, most)):
        best = more
    return best * ranks


def is_faster(x: torch.Tensor, weight: torch.Tensor, fewer: int, more: int) -> bool:
    """Whether `more` threads are clearly faster. They take turns, since the load of the machine changes with time."""
    times: dict[int, list[float]] = {fewer: [], more: []}
    for _ in range(ROUNDS):
        for count, seconds in times.items():
            torch.set_num_threads(count)
            seconds.append(seconds_of(x, weight))
    return statistics.median(times[more]) < GAIN * statistics.median(times[fewer])


def seconds_of(x: torch.Tensor, weight: torch.Tensor) -> float:
    """The mean time of the product of x [T, inputs] and weight [outputs, inputs]. The mean, since waiting must count."""
    F.linear(x, weight)  # wakes the threads
    start, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < ROUND or not count:
        F.linear(x, weight)
        count += 1
    return taken / count
