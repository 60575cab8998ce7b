"""No cache at all: every step computes the whole text, with the right result and quadratic work."""

from __future__ import annotations

from collections.abc import Iterator

from folovllm.learn.builders.reference import DecodeLoop as Right
from folovllm.learn.builders.reference import DoublingCache
from folovllm.learn.loop_runner import SampleToken


class DecodeLoop(Right):
    def answer(self, prompt: list[int], sample: SampleToken) -> Iterator[int]:
        tokens = list(prompt)
        while True:
            caches = [DoublingCache() for _ in range(self._num_layers)]
            tokens.append(sample(self._forward(tokens, 0, caches)))
            yield tokens[-1]
