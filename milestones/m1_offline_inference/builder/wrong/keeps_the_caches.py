"""The caches are made once: the second answer attends to the first one's tokens."""

from __future__ import annotations

from collections.abc import Iterator

from folovllm.learn.builders.reference import DecodeLoop as Right
from folovllm.learn.builders.reference import DoublingCache
from folovllm.learn.loop_runner import SampleToken, Forward


class DecodeLoop(Right):
    def __init__(self, forward: Forward, num_layers: int, max_model_len: int) -> None:
        super().__init__(forward, num_layers, max_model_len)
        self._caches = [DoublingCache() for _ in range(num_layers)]

    def answer(self, prompt: list[int], sample: SampleToken) -> Iterator[int]:
        tokens, start = prompt, 0
        while True:
            logits = self._forward(tokens, start, self._caches)
            start += len(tokens)
            tokens = [sample(logits)]
            yield tokens[0]
