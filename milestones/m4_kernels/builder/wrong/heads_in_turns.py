"""Query head h reads KV head h % Hkv, as if the heads of a group stood apart."""

from __future__ import annotations

from typing import Any

import torch

from folovllm.learn.builders.reference import prefill as right


def prefill(query: torch.Tensor, kv_cache: torch.Tensor, *rest: Any) -> torch.Tensor:
    num_heads, num_kv_heads = query.shape[1], kv_cache.shape[3]
    order = torch.arange(num_heads).view(-1, num_kv_heads).T.flatten()  # heads of one remainder side by side
    out, in_order = rest[5], rest[5][:, order].contiguous()
    right(query[:, order].contiguous(), kv_cache, *rest[:5], in_order, *rest[6:])
    out[:, order] = in_order
    return out
