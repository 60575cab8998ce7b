"""Sampling with `torch.compile`, as nano-vLLM does it: the alternative to the one-pass kernel."""

from __future__ import annotations

import torch

from folovllm.sample.sampler import Sampler, SamplingBatch


class CompiledSampler(Sampler):
    """A `Sampler` that compiles its arithmetic from the logits to the tokens. The tokens are the same.

    One variant serves batches of any size. A single row, and each set of filters, needs another variant. Each is compiled at
    its first use: that takes seconds on a GPU and up to half a minute on a CPU. Batches with top_p are not compiled: it sums
    along the vocabulary, and PyTorch 2.11 cannot generate the code for rows of that length.
    """

    def __init__(self) -> None:
        self._sample = torch.compile(super().sample, dynamic=True)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if batch.top_p is not None:
            return super().sample(logits, batch)
        return self._sample(logits, batch)
