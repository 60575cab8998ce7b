"""Places the new tokens at the beginning of the sequence: right for whole prompts, wrong for what comes behind cached ones."""

from __future__ import annotations

from typing import Any

import torch

from folovllm.learn.builders.reference import prefill as right


def prefill(
    query: torch.Tensor, kv_cache: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, *rest: Any
) -> torch.Tensor:
    return right(query, kv_cache, query_start_loc, query_start_loc.diff().int(), *rest)
