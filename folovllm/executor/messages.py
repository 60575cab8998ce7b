"""Encodes steps and results as int32 numbers, which another process reads from a ring.

A step goes in the layout that the device receives, without pickling: all ranks wait for it.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from folovllm.engine.setup import EngineSetup
from folovllm.models.model_config import num_experts_of
from folovllm.sample.sampling_row import RowField, SamplingUpdate, line_width
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.packed import LINES, Field, PackedStep, Parts, Sample, split
from folovllm.step.schedule import Int32

STOP: Int32 = np.empty(0, np.int32)  # the last message
HEADER = len(LINES) + 7  # int32 numbers before a step
MASKS = -1  # the first number of masks; a step's is its number of sequences
CALL: Int32 = np.array([-2], np.int32)  # a function to call comes through the rank's own connection


def encode_step(step: PackedStep | TokenBitmasks) -> Int32:
    """Encode a packed step (a header, then the same buffer that a device receives), or bitmasks."""
    if isinstance(step, TokenBitmasks):
        return np.concatenate([np.array([MASKS, len(step.rows)], np.int32), step.rows, step.bits.ravel()])
    rows = step.sampling_updates.num_rows, step.sampling_updates.num_with_line
    flags = step.is_special, step.has_memory, step.defers_sampling
    return step.flatten([step.num_seqs, step.num_decodes, *rows, *flags, *step.columns])


def decode_step(message: Int32) -> PackedStep | TokenBitmasks:
    """Return the packed step or the bitmasks that `encode_step` encoded."""
    if message[0] == MASKS:
        rows, bits = np.split(message[2:], [int(message[1])])
        return TokenBitmasks(rows, bits.reshape(len(rows), -1))
    num_seqs, num_decodes, num_rows, num_with_line, *rest = message[:HEADER].tolist()
    parts = split(message[HEADER:], Parts(*rest[3:]))
    sampling_updates = SamplingUpdate(parts.sampling_updates, num_rows, num_with_line)
    return PackedStep(
        parts.fields, num_seqs, num_decodes, parts.tokens, parts.updates, parts.samples, sampling_updates, parts.scores,
        parts.logprobs, parts.extras, *map(bool, rest[:3]),
    )  # fmt: skip


def encode_result(result: object) -> Int32:
    """Encode what rank 0 sends back. Its lists are short, so that pickling them is faster than making arrays of them."""
    data = pickle.dumps(result, pickle.HIGHEST_PROTOCOL)
    return np.frombuffer(data + bytes(-len(data) % 4), np.int32)


def decode_result(message: Int32) -> Any:
    """Return the result that `encode_result` encoded."""
    return pickle.loads(message.tobytes())  # behind the end of the pickle nothing is read


def longest_messages(setup: EngineSetup) -> tuple[int, int]:
    """Return the largest number of int32 numbers in a step and in a result. Unused memory of a ring is never allocated.

    A result is counted as int32 numbers and doubled: a pickle takes up to 9 bytes for a number, and some for each list.
    """
    rows, tokens, vocab_size = setup.max_num_seqs, setup.max_num_batched_tokens, setup.vocab_size
    blocks = -(-setup.max_model_len // setup.block_size)
    samples = rows + tokens  # at most: one a sequence, or with drafts one a token
    per_row = len(Field) + 3 * blocks + 3 + 1 + len(RowField) + 3 * line_width(vocab_size)
    per_score = 2 + 3 * (1 + min(setup.config.max_logprobs, vocab_size))
    load = 1 + setup.hf_config.num_hidden_layers * (1 + 2 * num_experts_of(setup.hf_config))
    result = 1 + rows * (4 + 3 * (vocab_size + 1)) + per_score * tokens
    return HEADER + rows * per_row + 5 * tokens + (len(Sample) + 2) * samples, 2 * max(result, load)


def plain(setup: EngineSetup) -> EngineSetup:
    """The set-up as it can be sent: without what may not exist in another process.

    That is a class of the model's own, and a proposer of the user's, for which a name stands: it drafts where the scheduler is.
    """
    config, hf_config = setup.config, SimpleNamespace(**setup.hf_config.to_dict())
    speculation = config.extras.get("speculative_config")
    if speculation is not None and not speculation.methods:
        config = replace(config, extras={**config.extras, "speculative_config": replace(speculation, method="ngram")})
    return replace(setup, config=config, hf_config=hf_config)
