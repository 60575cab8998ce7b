"""Recorded steps with guesses: as those with prompts, but of each sequence any number of tokens may be drawn after."""

from __future__ import annotations

from dataclasses import replace

import torch

from folovllm.setup import EngineSetup
from folovllm.step.packed import Int32, PackedStep
from folovllm.step.verify import Draws, most_draws
from folovllm.worker.prompt_graphs import Line, PromptGraphs, Room

TOKENS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class CheckRoom(Room):
    """Room for so many tokens, of one sequence or of as many sequences. The line LAST has the token of each draw."""

    @property
    def prompts(self) -> int:
        """Sequences, and one more for padding."""
        return self.tokens + 1

    @property
    def has_guesses(self) -> bool:
        """As `Room`."""
        return True


class CheckGraphs(PromptGraphs):
    """The recorded steps. What a graph leaves are the hidden states of all tokens after which one is drawn."""

    def pad_draws(self, step: PackedStep, draws: Draws) -> tuple[Room | None, Int32]:
        """As `pad`. Sequences with one token are treated as the others."""
        room, numbers = self.pad(replace(step, num_decodes=0))
        if room is not None:
            first = Line.LAST * room.num_seqs
            numbers[first : first + len(draws.token)] = draws.token
        return room, numbers

    def logits_of_draws(
        self, step: PackedStep, flat: torch.Tensor, room: Room, padded: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Run a step, as `logits` does, of which `count` tokens are drawn. Returns [count, V]."""
        self._tables.enter_blocks(step, flat)
        self.graph(room).replay(padded)
        logits: torch.Tensor = self._runner.model.lm_head(self._last_hidden[:count])
        return logits

    def _wanted(self) -> list[Room]:
        return check_rooms(self._setup) if self._runner.supports_prompt_graph() else []


def check_rooms(setup: EngineSetup) -> list[Room]:
    """What to record on a device, small ones first; nothing on a CPU."""
    return rooms(most_draws(setup.max_num_seqs)) if setup.device.type == "cuda" else []


def rooms(most: int) -> list[Room]:
    """Rooms for up to `most` draws."""
    return [CheckRoom(n, 0) for n in (*[n for n in TOKENS if n < most], min(most, TOKENS[-1]))]
