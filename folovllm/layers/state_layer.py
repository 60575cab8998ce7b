"""The interface of layers that keep a state of fixed size for each sequence, in place of K and V of each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

import torch
from torch import nn

from folovllm.forward_batch import ForwardBatch

Shape = tuple[tuple[int, ...], torch.dtype]  # of one sequence's state


class StateLayer(nn.Module, ABC):
    """Reads the states of a batch's sequences and updates them in place.

    A sequence's state is in the slot of its row, `batch.rows`, from its first step until it no longer runs. So no slot is
    handed out, and a preempted sequence gives its slot up with its row. What a slot holds belongs to the sequence only if it
    has computed tokens (`lacks_initial_state`): else it is what another sequence left there, or it was never written.
    """

    states: tuple[
        torch.Tensor, ...
    ]  # for each of `state_shapes` [slots, ...]; the runner binds them (`worker/states.py`)

    @abstractmethod
    def state_shapes(self) -> tuple[Shape, ...]:
        """The tensors of one sequence's state."""

    @property
    def state_bytes(self) -> int:
        """Memory of one sequence's state. Each decode reads it and writes it."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.state_shapes())

    @property
    @abstractmethod
    def state_flops(self) -> int:
        """Additions and multiplications that a token takes at least, products with weights left out."""


def lacks_initial_state(batch: ForwardBatch) -> torch.Tensor:
    """[S] bool: True where a sequence has computed nothing before this step, so its initial state is zero.

    Padding counts as such.
    """
    return batch.seq_lens - batch.query_start_loc.diff() <= 0
