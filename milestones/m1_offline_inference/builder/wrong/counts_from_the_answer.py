"""The first token of the answer stands at position 0 again: its key is turned as if nothing came before it."""

from __future__ import annotations

from collections.abc import Iterator

from folovllm.learn.builders.reference import DecodeLoop as Right
from folovllm.learn.builders.reference import DoublingCache
from folovllm.learn.loop_runner import SampleToken, Forward


class DecodeLoop(Right):
    def answer(self, prompt: list[int], sample: SampleToken) -> Iterator[int]:
        caches = [DoublingCache() for _ in range(self._num_layers)]
        logits, start = self._forward(prompt, 0, caches), 0
        while True:
            token = sample(logits)
            yield token
            logits = self._forward([token], start, caches)
            start += 1
