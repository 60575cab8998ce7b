"""The tokens that a draft model sampled, for the step that verifies them: on the device at once, on the host a little later."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from folovllm.setup import EngineSetup
from folovllm.step.packed import Int32


class DraftTokens:
    """The tokens of a draft model's last multi-step decode, by line and row. Each has a *placeholder id*, behind the vocabulary.

    So a step can bring draft tokens that the host does not know yet: both models are on one device, which works in order. A placeholder id holds until the next multi-step decode begins.

    Attributes:
        sampled: [lines, rows] int32, on the device. host: the same in host memory, once `arrived`.
        names: [lines, rows] int32, the placeholder ids.
    """

    def __init__(self, vocab_size: int, num_lines: int, num_rows: int, device: torch.device) -> None:
        shape = num_lines, num_rows
        self._first_placeholder = vocab_size
        self._resolved = torch.arange(-1, vocab_size + num_lines * num_rows, dtype=torch.int32, device=device)
        self.sampled = self._resolved[1 + vocab_size :].view(shape)
        self.placeholder_ids: Int32 = np.arange(num_lines * num_rows, dtype=np.int32).reshape(shape) + vocab_size
        self.host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._on_host = self.host.numpy().ravel()  # a view
        self.arrived: torch.cuda.Event | None = None  # behind the last multi-step decode; None on a CPU

    @classmethod
    def for_multi_step(cls, longest: int, setup: EngineSetup) -> DraftTokens:
        """Return room for multi-step decodes of up to `longest` steps in graphs of 1, 2, 4, ... steps, each with lines of its own.

        `setup` describes the model that verifies. Lines begin at multiples of 16 bytes.
        """
        rows = -(-setup.max_num_seqs // 4) * 4
        return cls(setup.vocab_size, (1 << longest.bit_length()) - 1, rows, setup.device)

    def resolve_on_device(self, tokens: torch.Tensor) -> None:
        """Replace placeholder ids in `tokens` [n] int32; what is in flight stays. Device work only."""
        torch.index_select(self._resolved, 0, tokens + 1, out=tokens)

    def resolve(self, tokens: npt.NDArray[np.signedinteger[Any]]) -> npt.NDArray[np.signedinteger[Any]]:
        """Return [n] tokens with their placeholder ids replaced. The host waits for the multi-step decode."""
        if self.arrived is not None:
            self.arrived.synchronize()
        places = tokens - self._first_placeholder
        return np.where(places >= 0, self._on_host[np.maximum(places, 0)], tokens)
