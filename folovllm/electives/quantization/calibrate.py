"""Calibrate the scales of an FP8 KV cache on the K/V of some tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from folovllm.attention.backends.registry import make_backend
from folovllm.engine.setup import EngineSetup
from folovllm.layers.attention import attention_layers
from folovllm.step.kv_format import LARGEST, KVScales, decode, encode
from folovllm.step.schedule import ScheduledSequence
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.warm_up import dummy_seqs

TOKENS = 512  # to calibrate with
HEADROOM = 2.0  # a prompt may bring larger numbers than these


def calibrate(runner: ModelRunner) -> None:
    """Set the scales of an FP8 cache: compute some tokens over a cache of full precision, and measure their K/V."""
    setup, layers = runner._setup, attention_layers(runner.model)
    whole = make_backend(setup.backend, replace(setup.attention, kv_dtype=None))
    scheduled_seqs = calibration_seqs(setup)
    num_tokens = scheduled_seqs[-1].end
    runner.allocate_kv_cache(-(-num_tokens // setup.block_size), setup.dtype)
    runner.kv_cache.zero_()
    for attention in layers:
        attention.bind(whole)
    with torch.inference_mode():
        for batch in (runner._input_batch.build([scheduled]) for scheduled in scheduled_seqs):
            whole.plan(batch)
            runner.model(batch)
        found = centred_scales_of([attention.kv_cache for attention in layers], num_tokens)
    for attention, scales in zip(layers, found, strict=True):
        attention.scales = scales
    runner.bind_backends()
    runner.allocate_kv_cache(0)


def calibration_seqs(setup: EngineSetup) -> list[ScheduledSequence]:
    """Return one sequence of tokens from all over the vocabulary, cut into steps that the engine has room for.

    It is the same at every start, for any size of steps and on any number of ranks.
    """
    length, most, size = min(TOKENS, setup.max_model_len), setup.max_num_batched_tokens, setup.block_size
    (whole,) = dummy_seqs([length], size)
    vocab_size = getattr(setup.hf_config, "whole_vocab_size", setup.vocab_size)  # a rank's own is a part
    tokens = np.random.default_rng(0).integers(0, vocab_size, length, dtype=np.int32)
    steps = []
    for start in range(0, length, most):
        end = min(start + most, length)
        first, last = -(-start // size), -(-end // size)
        blocks, sampling = whole.new_blocks[first:last], None if start else whole.sampling
        step = whole._replace(
            start=start, end=end, token_ids=tokens[start:end], new_blocks=blocks, first_new_block=first
        )
        steps.append(step._replace(sampling=sampling))
    return steps


def scales_of(kv_caches: Sequence[torch.Tensor]) -> list[KVScales]:
    """For each layer's cache [2, N, B, Hkv, D] in 16 or 32 bits, scales that bring its largest K and V to half the range.

    Powers of two: they move exponents and leave mantissas alone, so a number loses nothing but its last bits.
    """
    largest = torch.stack([cache.abs().amax(dim=(1, 2, 3, 4)) for cache in kv_caches]).float()  # [L, 2]
    scales = torch.exp2((largest * HEADROOM / LARGEST).clamp(min=2.0**-40).log2().ceil())
    return [KVScales(key, value) for key, value in scales.tolist()]


def centred_scales_of(kv_caches: Sequence[torch.Tensor], num_tokens: int) -> list[KVScales]:
    """Return for each layer the scales of `scales_of`, and an offset that is subtracted from all keys before they are rounded.

    The first `num_tokens` slots of each cache hold one sequence. The offset is about the mean of its keys: the error of an 8-bit
    number is a fraction of its size, and what all keys have in common is large and tells no two of them apart (SageAttention;
    Zhang et al., 2024). It is not quite the mean: the first key of a sequence often gets half of all attention and hardly depends
    on its token. So the offset is moved until the first key has no error.
    """
    found = []
    for cache in kv_caches:
        key, value = cache.flatten(1, 2)[:, :num_tokens].float()  # [num_tokens, Hkv, D] each
        mean = key.mean(0)
        (scales,) = scales_of([torch.stack([key - mean, value])[:, None]])
        first = decode(encode(key[0] - mean, scales.key_factor), scales.key, torch.float32)
        found.append(replace(scales, offset=key[0] - first))
    return found
