"""Layers that keep a state of fixed size for each sequence, in place of K and V of each token, and the pool of their states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from folovllm.engine.setup import EngineSetup
from folovllm.models.model_config import num_linear_of
from folovllm.models.registry import build_model
from folovllm.step.forward_batch import ForwardBatch
from folovllm.step.schedule import Extras, Int32

if TYPE_CHECKING:
    from transformers import PretrainedConfig

STATES = "states"  # the owner of copies of states in a step's extras: index, snapshot to load before it, snapshot to save to after it
NO_SNAPSHOT = -1  # in the place of a number of a snapshot
Shape = tuple[tuple[int, ...], torch.dtype]  # of one sequence's state


class StateLayer(nn.Module, ABC):
    """Reads the states of a batch's sequences and updates them in place.

    A sequence's state is in the slot of its row, `batch.rows`, from its first step until it no longer runs. So no slot is
    handed out, and a preempted sequence gives its slot up with its row. What a slot holds belongs to the sequence only if it
    has computed tokens (`lacks_initial_state`): else it is what another sequence left there, or it was never written.
    """

    states: tuple[torch.Tensor, ...]  # for each of `state_shapes` [slots, ...]; `StatePool` binds them

    @abstractmethod
    def state_shapes(self) -> tuple[Shape, ...]:
        """The tensors of one sequence's state."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state. Each decode reads and writes them."""
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


def state_layers(config: PretrainedConfig, dtype: torch.dtype) -> list[StateLayer]:
    """The layers that keep a state for each sequence, without weights."""
    return layers_of(build_model(config, dtype, "meta", max_model_len=1))


def layers_of(model: nn.Module) -> list[StateLayer]:
    """The layers of a model that keep a state."""
    return [module for module in model.modules() if isinstance(module, StateLayer)]


def num_snapshots(setup: EngineSetup) -> int:
    """Return how many snapshots of states are kept; 0 if prefixes are not cached, or no layer keeps a state."""
    if not (setup.config.enable_prefix_caching and num_linear_of(setup.hf_config)):
        return 0
    return setup.config.num_snapshots or max(16, setup.max_num_seqs)


class StatePool:
    """Slots for the states of all layers: one for each row, one for padding, then the snapshots.

    A snapshot is a copy of a row's state after a step, from which another sequence may start. Snapshot indices
    start at 0; snapshot i is in slot max_num_seqs + 1 + i.
    """

    def __init__(self, setup: EngineSetup, model: nn.Module, free: int) -> None:
        """Allocate the slots, and bind each layer to its part. Raises ValueError if they take more than `free` bytes."""
        layers, self._first_snapshot = layers_of(model), setup.max_num_seqs + 1
        slots = self._first_snapshot + num_snapshots(setup)
        needed = slots * sum(layer.state_bytes for layer in layers)
        on_gpu, config = setup.device.type == "cuda", setup.config
        if not (on_gpu or config.num_kv_blocks):  # else the cache has a size of its own
            free = min(free, config.kv_cache_memory)
        if needed > free:
            raise ValueError(
                f"the states of {slots - 1:,} sequences and snapshots take {needed:,} bytes, and there are {free:,}: lower "
                f"max_num_seqs or num_snapshots{'' if on_gpu else ', or raise kv_cache_memory'}"
            )
        self.tensors = [
            torch.zeros(len(layers), slots, *shape, dtype=dtype, device=setup.device)
            for shape, dtype in (layers[0].state_shapes() if layers else ())
        ]  # [L, slots, ...]
        for layer, *states in zip(layers, *self.tensors, strict=True):
            layer.states = tuple(states)

    @property
    def num_bytes(self) -> int:
        """The memory of all slots."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def load(self, extras: Extras, rows: Sequence[int] | Int32) -> None:
        """Copy snapshots to `rows` [S], before a step with these extras."""
        if (copies := extras.get(STATES)) is not None:
            index, loads, _ = copies[copies[:, 1] >= 0].T
            self._copy(self._first_snapshot + loads, np.asarray(rows)[index])

    def save(self, extras: Extras, rows: Sequence[int] | Int32) -> None:
        """Copy `rows` [S] to snapshots, after such a step."""
        if (copies := extras.get(STATES)) is not None:
            index, _, saves = copies[copies[:, 2] >= 0].T
            self._copy(np.asarray(rows)[index], self._first_snapshot + saves)

    def _copy(self, source: Int32, target: Int32) -> None:
        if not len(source):
            return
        device = self.tensors[0].device
        at = torch.from_numpy(np.stack([source, target]).astype(np.int64))
        at = at.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else at
        for tensor in self.tensors:
            tensor[:, at[1]] = tensor[:, at[0]]
