"""The states of layers that have one of fixed size for each sequence (`StateLayer`), and copies of them."""

from __future__ import annotations

import numpy as np
import torch

from folovllm.layers.state_layer import StateLayer
from folovllm.models.llama import LlamaForCausalLM
from folovllm.setup import EngineSetup
from folovllm.step.packed import Int32


class StatePool:
    """Slots for the states of all layers: one for each row, one for padding, then the snapshots.

    A snapshot is a copy of a row's state after a step, from which another sequence may start. Snapshot indices
    start at 0; snapshot i is in slot max_num_seqs + 1 + i. For a model without such layers the pool is empty and copies nothing.
    """

    def __init__(self, setup: EngineSetup, model: LlamaForCausalLM) -> None:
        """Allocate the slots, and bind each layer to its part. Raises ValueError if there is no memory for them."""
        layers = [module for module in model.modules() if isinstance(module, StateLayer)]
        self._first_snapshot = setup.max_num_seqs + 1
        slots = self._first_snapshot + setup.num_snapshots
        shapes = layers[0].state_shapes() if layers else ()
        try:
            self.tensors = [
                torch.zeros(len(layers), slots, *shape, dtype=dtype, device=setup.device) for shape, dtype in shapes
            ]  # [L, slots, ...]
        except RuntimeError as error:
            raise ValueError(
                f"there is no memory for the states of {slots - 1} sequences and snapshots: lower max_num_seqs or num_snapshots"
            ) from error
        for i, layer in enumerate(layers):
            layer.states = tuple(tensor[i] for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """The memory of all slots."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def load(self, copies: Int32) -> None:
        """Copy snapshots to rows, before a step. `copies`: `PackedStep.states`."""
        rows, loads, _ = copies
        self._copy(self._first_snapshot + loads[loads >= 0], rows[loads >= 0])

    def save(self, copies: Int32) -> None:
        """Copy rows to snapshots, after a step."""
        rows, _, saves = copies
        self._copy(rows[saves >= 0], self._first_snapshot + saves[saves >= 0])

    def _copy(self, source: Int32, target: Int32) -> None:
        if not len(source):
            return
        device = self.tensors[0].device
        at = torch.from_numpy(np.stack([source, target]).astype(np.int64))
        at = at.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else at
        for tensor in self.tensors:
            tensor[:, at[1]] = tensor[:, at[0]]
