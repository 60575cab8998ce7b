"""Runs our model inside a decode loop that a learner wrote. The loop keeps the cache and decides what is computed when."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch

from folovllm.attention.backends.torch_cat import TorchCatBackend
from folovllm.engine.setup import EngineSetup
from folovllm.layers.attention import attention_layers
from folovllm.models.llama import LlamaForCausalLM
from folovllm.sample.logprobs import score_hidden
from folovllm.sample.sampler import Sampler, SamplerOutput
from folovllm.step.schedule import Logprobs, SchedulerOutput, StepResult, one_each
from folovllm.worker.serial_model_runner import SerialModelRunner, single_sequence_batch


class LayerCache(Protocol):
    """K and V of one layer, of one sequence."""

    def append(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the K and V of new tokens, two [T, Hkv, D], behind those that are there."""

    @property
    def key(self) -> torch.Tensor:
        """K of all cached tokens in their order, [n, Hkv, D]."""

    @property
    def value(self) -> torch.Tensor:
        """V of all cached tokens in their order, [n, Hkv, D]."""

    def __len__(self) -> int:
        """n: how many tokens are cached."""


Forward = Callable[[list[int], int, list[LayerCache]], torch.Tensor]
SampleToken = Callable[[torch.Tensor], int]


class TokenLoop(ABC):
    """Turns a prompt into an answer, a token at a time. It owns the KV cache."""

    @abstractmethod
    def __init__(self, forward: Forward, num_layers: int, max_model_len: int) -> None:
        """Keep what the loop needs.

        Args:
            forward: `forward(token_ids, start, caches)` runs the model on tokens that stand at the positions `start`,
                `start + 1`, ... Layer i appends their K and V to `caches[i]`, then each token attends to all that is
                cached before it and to itself. Returns the logits [V] after the last of them.
            num_layers: how many layers, and so how many caches, there are.
            max_model_len: the longest prompt plus answer, in tokens.
        """

    @abstractmethod
    def answer(self, prompt: list[int], sample: SampleToken) -> Iterator[int]:
        """Yield the tokens of the answer to `prompt`, without end: the engine stops to ask when the answer is over.

        `sample(logits)` samples the next token from logits [V]. Each token is sampled once, and yielded unchanged.
        """


class LoopRunner(SerialModelRunner):
    """Takes one token a step from a `TokenLoop`."""

    def __init__(
        self,
        setup: EngineSetup,
        load: Callable[[], LlamaForCausalLM],
        sampler: Sampler,
        loop: Callable[[Forward, int, int], TokenLoop],
    ) -> None:
        super().__init__(setup, load, sampler)
        self._make_loop = loop
        self._sampled: SamplerOutput | None = None  # in this step
        self._scores: dict[int, list[Logprobs]] | None = None  # of this step; None: not computed yet

    def initialize_kv_cache(self) -> int:
        """Return 0: the loop keeps the caches, so nothing is allocated."""
        backend = TorchCatBackend(self._setup.attention)
        self._layers = attention_layers(self.model)
        for attention in self._layers:
            attention.bind(backend)
        self._loop = self._make_loop(self._forward, len(self._layers), self._setup.max_model_len)
        return 0

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        """Run the loop to its next token, and return it."""
        (scheduled,) = output.scheduled_seqs
        self._begin_step(output)
        if scheduled.sampling is not None:
            self._sampling_rows.set({scheduled.row: scheduled.sampling})
            self._answer = self._loop.answer(scheduled.token_ids.tolist(), self._sample)
        token, sampled = next(self._answer, None), self._sampled
        if sampled is None or token != sampled.token_ids[0]:
            raise RuntimeError("a decode loop samples one token, yields it unchanged, and goes on to the next")
        return one_each(output.scheduled_seqs, sampled.token_ids, sampled.logprobs, self._scores)

    def _begin_step(self, output: SchedulerOutput) -> None:
        self._output, self._scores, self._sampled = output, None, None

    def _forward(self, token_ids: list[int], start: int, caches: list[LayerCache]) -> torch.Tensor:
        for attention, cache in zip(self._layers, caches, strict=True):
            attention.kv_cache = cache  # type: ignore[assignment]  # the backend's own kind
        batch = single_sequence_batch(np.asarray(token_ids, np.int32), start, self._setup.device)
        hidden = self.model(batch)
        if self._scores is None:
            step = self._output.scheduled_seqs
            self._scores = {} if step[0].scores is None else score_hidden(self.model, step, hidden, batch)
        return self.model.compute_logits(hidden, batch)[0]

    def _sample(self, logits: torch.Tensor) -> int:
        (scheduled,) = self._output.scheduled_seqs
        row, position, extras = [scheduled.row], [scheduled.end], self._output.extras
        self._sampled = self._sampling_rows.sample(logits[None], row, position, extras=extras)
        return self._sampled.token_ids[0]
