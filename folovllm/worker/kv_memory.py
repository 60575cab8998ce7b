"""The memory profile: how many blocks of KV cache fit."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from folovllm.engine.setup import EngineSetup
from folovllm.models.model_config import window_of

logger = logging.getLogger("folovllm")

MOST_CACHED = 65_536  # blocks: each is an object on the host, and another engine may need memory too


def num_blocks_that_fit(
    setup: EngineSetup, profile: Callable[[], None], captured: float = 0.0, state_bytes: int = 0, more_bytes: int = 0
) -> int:
    """Return the number of blocks to allocate: `num_kv_blocks` if set, else as many as fit and the engine can use.

    The engine can use blocks for `max_num_seqs` sequences of the greatest length. With prefix caching it can use up to
    `MOST_CACHED`, because free blocks keep their contents.

    Args:
        profile: runs the largest possible step; on a GPU its peak memory is left free.
        captured: tokens of the largest captured step over those of the largest step. Captured steps have their own memory,
            and this share of the peak is left free for them.
        state_bytes: memory of the sequences' states, which is taken by now; on a CPU it is part of `kv_cache_memory`.
        more_bytes: K and V of one token in layers that are not the model's own.

    Raises ValueError, which says what would fit, if not even one sequence of `max_model_len` does.
    """
    blocks_per_seq = most_blocks_of_a_sequence(setup)
    bytes_per_block = setup.block_size * (setup.kv_bytes_per_token + more_bytes)
    num_blocks = setup.config.num_kv_blocks
    if num_blocks is None:
        if setup.device.type == "cuda":
            memory = _free_gpu_memory(setup, profile, captured)
        else:
            memory = setup.config.kv_cache_memory - state_bytes
        of_use = setup.max_num_seqs * blocks_per_seq
        if setup.config.enable_prefix_caching:
            of_use = max(of_use, MOST_CACHED)
        num_blocks = min(memory // bytes_per_block, of_use) if bytes_per_block else of_use  # 0: no layer has K and V
    if num_blocks < blocks_per_seq:
        fits = max(0, num_blocks) * setup.block_size
        beside = f" beside {state_bytes:,} bytes of states (max_num_seqs, num_snapshots)" if state_bytes else ""
        lower = f"lower max_model_len to {fits} or less, or " if fits else ""
        raise ValueError(
            f"the KV cache has room for {fits} tokens{beside}, less than one sequence of max_model_len {setup.max_model_len}: "
            f"{lower}raise kv_cache_memory (CPU), gpu_memory_utilization (GPU) or "
            f"num_kv_blocks (at least {blocks_per_seq}; a block of {setup.block_size} tokens takes {bytes_per_block:,} bytes)"
        )
    logger.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB", num_blocks, setup.block_size, num_blocks * bytes_per_block / 2**30
    )
    return num_blocks


def free_memory(device: torch.device) -> int:
    """Bytes that tables may take: nine tenths of what the device has left (of a CPU's memory outside Linux: of all)."""
    memory = Path("/proc/meminfo")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    elif memory.exists():
        free = 1024 * int(memory.read_text().split("MemAvailable:")[1].split()[0])
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(0.9 * free)


def most_blocks_of_a_sequence(setup: EngineSetup) -> int:
    """Return the most blocks that one sequence holds at once: those of `max_model_len` tokens, or fewer if every layer has a window.

    With a learner's component it is always the whole length, because it may keep blocks that have left the window.
    """
    whole, window = -(-setup.max_model_len // setup.block_size), window_of(setup.hf_config)
    if window is None or setup.config.builders:
        return whole
    step = setup.max_num_batched_tokens if setup.config.enable_chunked_prefill else setup.max_model_len
    return min(whole, most_held(window, step, setup.block_size))


def most_held(window: int, step: int, block_size: int) -> int:
    """The most blocks that one sequence holds at once, if it computes at most `step` tokens a step.

    They end with the tokens of the next step. They begin with its window; or, where prefixes are cached, with the tokens of
    the step under way, whose blocks have no names yet.
    """
    tokens = max(window - 1, step) + step
    return -(-(tokens - 1) // block_size) + 1  # which so many neighbours touch


def _free_gpu_memory(setup: EngineSetup, profile: Callable[[], None], captured: float) -> int:
    """Return the bytes for the cache: the usable share of the card, less the used memory, less the peaks of eager and captured steps."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(setup.device)
    before = torch.cuda.memory_allocated(setup.device)
    profile()
    torch.cuda.synchronize(setup.device)
    peak = torch.cuda.max_memory_allocated(setup.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(setup.device)
    return int(total * setup.config.gpu_memory_utilization - (total - free) - (1 + captured) * peak)
