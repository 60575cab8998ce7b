"""The CPU kernels as functions of tensors. Their results equal those of the layers in torch, up to rounding."""

from __future__ import annotations

import ctypes

import torch

from folovllm.step.forward_batch import ForwardBatch

MAX_ROWS = 16  # for more rows arithmetic takes the time, and the library is faster
POINTER, INDEX, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Linear(ctypes.Structure):
    """A linear layer. The structures in this file are those of `kernels.cpp`."""

    _fields_ = (("weight", POINTER), ("bias", POINTER), ("outputs", INDEX), ("inputs", INDEX))


class Heads(ctypes.Structure):
    """The parameters of heads between their projection and attention: QK-norm and RoPE."""

    _fields_ = (
        *((name, INDEX) for name in ("query", "kv", "size")),
        *((name, FLOAT) for name in ("scale", "eps")),
        *((name, POINTER) for name in ("query_norm", "key_norm", "cos_sin")),
    )


class Layer(ctypes.Structure):
    """A decoder layer. It holds pointers to its weights, and does not keep them alive."""

    _fields_ = (
        *((name, Linear) for name in ("qkv", "back", "gate_up", "down")),
        ("heads", Heads),
        *((name, POINTER) for name in ("input_norm", "post_norm")),
        *((name, FLOAT) for name in ("input_eps", "post_eps")),
    )


class Cache(ctypes.Structure):
    """A KV cache."""

    _fields_ = (("data", POINTER), *((name, INDEX) for name in ("values", "block", "token", "head", "block_size")))


class Batch(ctypes.Structure):
    """One new token of each sequence."""

    _fields_ = (
        *((name, INDEX) for name in ("sequences", "stride_table")),
        *((name, POINTER) for name in ("positions", "slots", "tables", "lengths")),
    )


class CpuKernels:
    """Calls the kernels for one dtype. All tensors but the cache are contiguous."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._library, self.dtype = library, dtype

    def multiplies(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether `multiply` is faster than the library for `x`, which is so for few rows."""
        return x.shape[0] <= MAX_ROWS and x.dtype == weight.dtype == self.dtype

    def decodes(self, batch: ForwardBatch, kv_cache: torch.Tensor) -> bool:
        """Return whether `decoder_layer` can compute a batch: few sequences of one new token each."""
        only_decodes = batch.num_decodes == batch.num_seqs <= MAX_ROWS and not batch.is_padded
        return only_decodes and kv_cache.dtype == self.dtype

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return x W^T + b, summed in float32 and rounded once: [T, inputs] -> [T, outputs], in `out` if given."""
        x = x.contiguous()  # the name keeps the tensor alive while the kernel reads it
        out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
        linear = ctypes.byref(linear_of(weight, bias))
        self._library.multiply(linear, at(x), at(out), x.shape[0], torch.get_num_threads())
        return out

    def attention(self, heads: Heads, kv_cache: torch.Tensor, batch: ForwardBatch, qkv: torch.Tensor) -> torch.Tensor:
        """Compute QK-norm, RoPE and attention: [S, (Hq + 2 Hkv) D] -> [S, Hq D]. It also stores the new K and V in the cache."""
        query, out = (qkv.new_empty(qkv.shape[0], heads.query * heads.size) for _ in range(2))
        cache, described = ctypes.byref(cache_of(kv_cache)), ctypes.byref(batch_of(batch))
        numbers = at(qkv), at(query), at(out)
        self._library.attention(ctypes.byref(heads), cache, described, *numbers, torch.get_num_threads())
        return out

    def decoder_layer(
        self, layer: Layer, kv_cache: torch.Tensor, batch: ForwardBatch, x: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """Compute a decoder layer for a batch that it `decodes`. `x` and `residual` [S, H] are overwritten with its outputs."""
        cache, described = ctypes.byref(cache_of(kv_cache)), ctypes.byref(batch_of(batch))
        self._library.decoder_layer(ctypes.byref(layer), cache, described, at(x), at(residual), torch.get_num_threads())


def at(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a contiguous tensor, or None."""
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """Return the structure of a linear layer with `weight` [outputs, inputs]."""
    return Linear(at(weight), at(bias), *weight.shape)


def cache_of(kv_cache: torch.Tensor) -> Cache:
    """Return the structure of a cache [2, N, B, Hkv, D]. D is contiguous, the other strides are free."""
    values, block, token, head, one = kv_cache.stride()
    assert one == 1
    return Cache(kv_cache.data_ptr(), values, block, token, head, kv_cache.shape[2])


def batch_of(batch: ForwardBatch) -> Batch:
    """Return the structure of a batch of decodes."""
    tables = batch.block_tables
    pointers = at(batch.positions), at(batch.slot_mapping), at(tables), at(batch.seq_lens)
    return Batch(batch.num_seqs, tables.shape[1], *pointers)
