"""What a linear layer reads during calibration, in as few numbers as GPTQ and AWQ need."""

from __future__ import annotations

import torch


class Inputs:
    """Sums over all calibration tokens; the inputs themselves are not kept."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._squares = torch.zeros(size, size, device=device)  # 4 size^2 bytes
        self._sizes = torch.zeros(size, device=device)
        self.num_tokens = 0

    def add(self, x: torch.Tensor) -> None:
        """Count tokens in, [T, size]."""
        x = x.float()
        self._squares.addmm_(x.t(), x)
        self._sizes += x.abs().sum(dim=0)
        self.num_tokens += len(x)

    def divide(self, scale: torch.Tensor) -> None:
        """Be the statistics of the inputs divided by `scale` [size]."""
        self._squares /= torch.outer(scale, scale)
        self._sizes /= scale

    @property
    def gram(self) -> torch.Tensor:
        """x^T x / T: [size, size] float32."""
        return self._squares / self.num_tokens

    @property
    def magnitude(self) -> torch.Tensor:
        """The mean absolute value of each input: [size] float32."""
        return self._sizes / self.num_tokens
