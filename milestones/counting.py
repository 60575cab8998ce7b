"""Bytes and operations, counted: of torch by looking at every operation, of Triton in its interpreter."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from folovllm.attention.ops import create_causal_mask, naive_attention


class CountBytes(TorchDispatchMode):
    """While it is entered, adds up what torch's operations read and write. A view moves nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            self.total += _moved(func, args, result)
        return result


def _moved(func: Any, args: Any, result: Any) -> int:
    """Bytes of the tensors that go in and come out. An operation in place writes what it is given, not all that is there."""
    is_in_place = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    read = sum(_nbytes(value) for value in args[is_in_place:])
    if not is_in_place:
        return read + _nbytes(result)
    return read + (min(read, _nbytes(args[0])) or _nbytes(args[0]))


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


class ToyModel:
    """What a decode loop drives: layers whose K and V are zeros. Counts what is computed, and what the caches move."""

    def __init__(self, num_layers: int, num_kv_heads: int = 2, head_dim: int = 16) -> None:
        self.moved = CountBytes()
        self.num_tokens = 0
        self.num_pairs = 0  # of a query and a key that it sees
        self.bytes_per_token = num_layers * 2 * num_kv_heads * head_dim * 4
        self._shape = num_kv_heads, head_dim

    def __call__(self, token_ids: list[int], start: int, caches: list[Any]) -> torch.Tensor:
        count = len(token_ids)
        self.num_tokens += count
        self.num_pairs += sum(range(start + 1, start + count + 1))
        for cache in caches:
            new = torch.zeros(count, *self._shape)
            with self.moved:
                cache.append(new, new)
                assert len(cache.key) == len(cache.value) == start + count, "the cache has all tokens so far"
        return torch.zeros(8)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """What Triton's interpreter does meanwhile: bytes that are "loaded" and "stored", and the "flops" of products.

    Raises:
        ValueError: Triton compiles for a GPU here.
    """
    import triton
    from triton.runtime.interpreter import interpreter_builder as builder

    if not triton.knobs.runtime.interpret:
        raise ValueError("kernels are counted in Triton's interpreter: set TRITON_INTERPRET=1 before Python starts")
    counts: Counter[str] = Counter()
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

    def counting_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        counts["loaded"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(ptrs, mask, *rest)

    def counting_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        counts["stored"] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(ptrs, value, mask, *rest)

    def counting_dot(a: Any, b: Any, *rest: Any) -> Any:
        counts["flops"] += 2 * a.data.size * b.data.shape[-1]
        return dot(a, b, *rest)

    with (
        patch.object(builder, "create_masked_load", counting_load),
        patch.object(builder, "create_masked_store", counting_store),
        patch.object(builder, "create_dot", counting_dot),
    ):
        yield counts


def count_kernel(kernel: Any, lens: list[int], new: list[int]) -> dict[str, float]:
    """Run a prefill kernel in the interpreter, check its result, and count what it loads, stores and multiplies.

    Raises:
        ValueError: Triton compiles for a GPU here, or the result is wrong.
    """
    num_heads, num_kv_heads, dim, size = 4, 2, 32, 16
    torch.manual_seed(0)
    blocks = [-(-n // size) for n in lens]
    order = torch.randperm(sum(blocks)).int().split(blocks)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    cache = torch.randn(2, sum(blocks), num_kv_heads, size, dim).permute(0, 1, 3, 2, 4)
    query = torch.randn(sum(new), num_heads, dim)
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    out = torch.full_like(query, torch.nan)
    with counted() as counts:
        kernel(query, cache, starts, torch.tensor(lens, dtype=torch.int32), tables, max(new), dim**-0.5, out)

    expected, pairs = [], 0
    for q, table, length in zip(query.split(new), order, lens, strict=True):
        key, value = cache[:, table.long()].flatten(1, 2)[:, :length]
        mask = create_causal_mask(len(q), length)
        pairs += int(mask.sum())
        expected.append(naive_attention(q, key, value, dim**-0.5, mask))
    if not torch.allclose(out, torch.cat(expected), atol=1e-4):
        raise ValueError(
            "the kernel's result is wrong, so its bytes do not count: python -m milestones test m4.builder"
        )
    least = 4 * dim * (2 * sum(new) * num_heads + 2 * sum(lens) * num_kv_heads)  # all in and out once
    moved = counts["loaded"] + counts["stored"]
    return {
        "bytes moved": moved,
        "of the least": moved / least,
        "FLOPs": counts["flops"],
        "of those needed": counts["flops"] / (4 * dim * num_heads * pairs),
    }
