"""The kernels for a CPU as functions of tensors. Their results are those of the layers in torch, up to rounding."""

from __future__ import annotations

import ctypes

import torch

from folovllm.forward_batch import ForwardBatch
from folovllm.kernels.preparation import Preparation

MAX_ROWS = {torch.float32: 8, torch.float16: 8, torch.bfloat16: 4}  # from there on the library's product is as fast
ALONE = 1 << 15  # numbers that one thread has read before a second one has woken up


class Cache(ctypes.Structure):
    """A KV cache as the kernels are told of it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("values", "block", "token", "head", "block_size")),
    )


class CpuKernels:
    """Calls the kernels for one dtype. Tensors are contiguous, and of that dtype unless it is said otherwise."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self.dtype = library, dtype

    def multiplies(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether `linear` is the product to take for the rows of `x`: they are few."""
        return x.shape[0] <= MAX_ROWS[self.dtype] and x.dtype == weight.dtype == self.dtype and weight.is_contiguous()

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x W^T, plus `bias` [outputs] and `residual` [T, outputs] where they are: [T, inputs] -> [T, outputs], in `out` if given.

        All is added up in float32 and rounded once. Rows of `x` may be apart; their numbers are not.
        """
        outputs, inputs = weight.shape
        out = x.new_empty(x.shape[0], outputs) if out is None else out
        assert x.stride(1) == 1 or inputs == 1
        self._library.linear(
            x.data_ptr(), at(weight), at(bias), at(residual), at(out), x.shape[0], x.stride(0), inputs, outputs,
            num_threads(weight.numel()),
        )  # fmt: skip
        return out

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm` of [..., size]: the normed sum, and the sum; without a residual that of nothing, `x` itself."""
        out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        size, count = x.shape[-1], x.numel()
        self._library.rms_norm(
            at(x), at(residual), at(weight), at(total), at(out), count // size, size, eps, num_threads(count)
        )
        return out, total

    def prepare(
        self,
        qkv: torch.Tensor,
        preparation: Preparation,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Norm, where there is one, and rotate queries and keys, and cache keys and values: [T, (Hq + 2 Hkv) D] -> [T, Hq, D].

        `positions` and `slots` [T] are int64; slot -1 is skipped. `kv_cache` [2, N, B, Hkv, D] may have any strides but the last.
        """
        p, kv_heads, size = preparation, kv_cache.shape[3], kv_cache.shape[4]
        heads = qkv.shape[1] // size - 2 * kv_heads
        query = qkv.new_empty(qkv.shape[0], heads, size)
        self._library.prepare(
            at(qkv), at(p.q_weight), at(p.k_weight), at(p.cos_sin_cache), at(positions), at(slots), at(query),
            ctypes.byref(described(kv_cache)), qkv.shape[0], heads, kv_heads, size, p.eps,
            num_threads(qkv.numel()),
        )  # fmt: skip
        return query

    def decode(self, query: torch.Tensor, kv_cache: torch.Tensor, batch: ForwardBatch, scale: float) -> torch.Tensor:
        """Attention of one new token of each of the batch's first S sequences over its cache: [S, Hq, D] -> [S, Hq, D]."""
        sequences, heads, size = query.shape
        out = torch.empty_like(query)
        self._library.decode(
            at(query), ctypes.byref(described(kv_cache)), at(batch.block_tables), at(batch.seq_lens), at(out),
            sequences, batch.block_tables.stride(0), heads, kv_cache.shape[3], size, scale,
            num_threads(heads * size * sum(batch.seq_lens_host[:sequences])),
        )  # fmt: skip
        return out


def at(tensor: torch.Tensor | None) -> int | None:
    """Where its numbers begin."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def described(kv_cache: torch.Tensor) -> Cache:
    """A cache [2, N, B, Hkv, D] for the kernels."""
    values, block, token, head, one = kv_cache.stride()
    assert one == 1
    return Cache(kv_cache.data_ptr(), values, block, token, head, kv_cache.shape[2])


def num_threads(count: int) -> int:
    """Threads for so many numbers."""
    return 1 if count <= ALONE else torch.get_num_threads()
