"""Sampling through `torch.compile`, as nano-vLLM does it: the rival of the one-pass kernel."""

from __future__ import annotations

import torch

from folovllm.sample.sampler import Sampler, SamplingBatch


class CompiledSampler(Sampler):
    """A `Sampler` whose arithmetic, from the logits to the tokens, is generated code; the tokens are the same.

    One piece of code serves batches of any size, but one row alone, and each set of filters, takes another. That is
    compiled when it is first met: seconds on a GPU, up to half a minute on a CPU. With top_p rows are sampled as ever: it
    sums along the vocabulary, and for a row that long PyTorch 2.11 cannot generate the code.
    """

    def __init__(self) -> None:
        self._sample = torch.compile(super().sample, dynamic=True)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if batch.top_p is not None:
            return super().sample(logits, batch)
        return self._sample(logits, batch)
