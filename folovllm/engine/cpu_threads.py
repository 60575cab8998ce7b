"""How many threads torch computes with on a CPU."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

import torch

from folovllm.engine.setup import EngineSetup

SMALL = 1 << 19  # weights: a product with fewer is over before a second thread has woken up

logger = logging.getLogger("folovllm")


@dataclass(slots=True)
class _Process:
    chosen: int = 0  # what we set in this process
    limit: int = 0  # what the user set: `OMP_NUM_THREADS`, else the cores


_process = _Process()


def use_threads(setup: EngineSetup) -> int | None:
    """Set torch's number of threads in this process to `num_threads`, or choose it on a CPU. Returns it; None if it was left alone.

    Threads wait for each other at the end of a product: milliseconds, where other programs have the cores. So a small model
    gets one thread, and a larger one as many as a short measurement shows to be of use. Ranks divide the number.
    """
    asked, cores, limit = setup.config.num_threads, os.cpu_count() or 1, most_threads()
    if asked is None and setup.device.type != "cpu":
        return None
    if asked is not None and asked > cores:
        raise ValueError(f"num_threads {asked} is more than the {cores} cores of this machine: lower it")
    _process.chosen = asked or choose_threads(setup, limit)
    torch.set_num_threads(_process.chosen)
    if asked is None:
        logger.info("num_threads is %d (torch's own limit: %d)", _process.chosen, limit)
    return _process.chosen


def most_threads() -> int:
    """The number that the user allows: `OMP_NUM_THREADS` or `torch.set_num_threads`, else torch's default."""
    if torch.get_num_threads() != _process.chosen:  # not ours
        _process.limit = torch.get_num_threads()
    return _process.limit


def choose_threads(setup: EngineSetup, limit: int) -> int:
    """One for a small model; else what `fastest` finds. The number is that of all ranks together."""
    ranks = 1 if "TORCHELASTIC_RUN_ID" in os.environ else setup.config.tensor_parallel_size  # torchrun's divide nothing
    inputs = int(setup.hf_config.hidden_size)  # of the MLP's first product, the largest; `outputs` as one rank has them
    outputs = int(getattr(setup.hf_config, "intermediate_size", None) or 4 * inputs) // ranks
    if outputs * inputs < SMALL:
        return min(limit, ranks)
    from folovllm.engine.time_threads import fastest  # here, for a small model does without

    return fastest(outputs, inputs, setup.dtype, ranks, limit)
