"""A decode loop whose caches write each token once: they keep room ahead, and double it when it is full."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from folovllm.learn.loop_runner import Forward, LayerCache, SampleToken, TokenLoop

SMALLEST = 16  # tokens for which a new cache has room


class DoublingCache:
    """K and V of one layer in a buffer that is at least half full, so that an append copies two tokens at most on average."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None  # [2, room, Hkv, D]
        self._length = 0

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the K and V of new tokens, two [T, Hkv, D], behind those that are there."""
        start, self._length = self._length, self._length + len(key)
        if self._buffer is None or self._length > self._buffer.shape[1]:
            self._grow(key, start)
        assert self._buffer is not None
        self._buffer[0, start : self._length] = key
        self._buffer[1, start : self._length] = value

    def _grow(self, like: torch.Tensor, num_cached: int) -> None:
        old, room = self._buffer, SMALLEST
        while room < self._length:
            room *= 2
        self._buffer = like.new_empty(2, room, *like.shape[1:])
        if old is not None:
            self._buffer[:, :num_cached] = old[:, :num_cached]

    @property
    def key(self) -> torch.Tensor:
        """K of all cached tokens in their order, [n, Hkv, D]."""
        return self._cached()[0]

    @property
    def value(self) -> torch.Tensor:
        """V of all cached tokens in their order, [n, Hkv, D]."""
        return self._cached()[1]

    def __len__(self) -> int:
        return self._length

    def _cached(self) -> torch.Tensor:
        if self._buffer is None:
            raise RuntimeError("the cache is empty: append first")
        return self._buffer[:, : self._length]


class DecodeLoop(TokenLoop):
    """The prompt in one go, then each sampled token by itself."""

    def __init__(self, forward: Forward, num_layers: int, max_model_len: int) -> None:
        self._forward = forward
        self._num_layers = num_layers

    def answer(self, prompt: list[int], sample: SampleToken) -> Iterator[int]:
        """Yield the tokens of the answer."""
        caches: list[LayerCache] = [DoublingCache() for _ in range(self._num_layers)]
        tokens, start = prompt, 0
        while True:
            logits = self._forward(tokens, start, caches)
            start += len(tokens)
            token = sample(logits)
            yield token
            tokens = [token]
