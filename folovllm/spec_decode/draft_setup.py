"""The set-up of a draft model, before its weights are loaded."""

from __future__ import annotations

from dataclasses import replace

import torch

from folovllm.config import EngineConfig
from folovllm.engine.setup import set_up
from folovllm.model_config import num_positions
from folovllm.models.files import load_hf_config, resolve_model
from folovllm.setup import EngineSetup

MEMORY_SHARE = 0.05  # of the memory, for the K/V of a draft model


def draft_setup(setup: EngineSetup, model: str) -> EngineSetup:
    """Return the set-up of the draft model `model` for the large one that `setup` describes: on its device, in its dtype.

    Its cache has room for all sequences, or as much as `MEMORY_SHARE` of the memory holds. Raises ValueError if the two
    models do not share a vocabulary.
    """
    large = setup.config
    config = EngineConfig(
        model=model, dtype=str(setup.dtype), device=str(setup.device), max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens, enable_prefix_caching=False, enforce_eager=large.enforce_eager,
        num_threads=large.num_threads, trust_remote_code=large.trust_remote_code, use_tqdm=large.use_tqdm,
    )  # fmt: skip
    limit = num_positions(load_hf_config(resolve_model(model), config))
    draft = set_up(replace(config, max_model_len=min(limit, setup.max_model_len)))
    if draft.vocab_size != setup.vocab_size:
        raise ValueError(
            f"a draft must have the vocabulary of its model: {model} has {draft.vocab_size} tokens, {large.model} "
            f"{setup.vocab_size}"
        )
    memory = large.kv_cache_memory
    if setup.device.type == "cuda":
        memory = torch.cuda.get_device_properties(setup.device).total_memory
    blocks_per_seq = -(-draft.max_model_len // draft.block_size)
    affordable = int(MEMORY_SHARE * memory) // (draft.block_size * draft.kv_bytes_per_token)
    num_blocks = max(blocks_per_seq, min(affordable, blocks_per_seq * draft.max_num_seqs))
    return replace(draft, config=replace(draft.config, num_kv_blocks=num_blocks))
