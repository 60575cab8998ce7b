"""Recorded steps with prompts.

A model launches hundreds of kernels a step. A step of few tokens is over before Python has launched them all, and with a
prompt in it all decodes wait. So steps with prompts are recorded too, as far as they are small: with room for so many
tokens, decodes and prompts, of which a step fills a part.

Tokens stay end to end; what is left behind them is padding. Among the sequences, prompts begin at a fixed place, for
decodes and prompts go to different kernels. A step of two decodes and a prompt of 5 tokens, with room for 12 tokens, 4 decodes
and 3 prompts:

    ROW        4 7 - -  2 - -      - is the row behind all rows
    SEQ_LEN    9 3 0 0  5 0 0      of a sequence of length 0 nothing is read and nothing written
    QUERY_LEN  1 1 0 0  5 0 5      the last sequence, always padding, gets the tokens that nobody needs
    LAST       0 1 6 0  0 0 0      the last token of each sequence that is there

What a graph leaves are the last tokens' hidden states, so that all that follows sees the step as it came.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from folovllm.forward_batch import ForwardBatch
from folovllm.setup import EngineSetup
from folovllm.step.packed import Field, Int32, PackedStep
from folovllm.worker.device_tables import DeviceTables
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.step_graph import Recorder, StepGraph

TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 2560, 3072)  # beyond, computing takes longer than launching
DECODES = (0, 16, 64)  # and as many as there can be


class Line(IntEnum):
    """Lines of the matrix with which a padded step begins."""

    ROW = 0
    SEQ_LEN = 1
    QUERY_LEN = 2
    LAST = 3


class Room(NamedTuple):
    """What a recorded step has room for."""

    tokens: int
    decodes: int

    @property
    def prompts(self) -> int:
        """Sequences that are no decodes, and one more for padding."""
        return max(8, self.tokens // 32) + 1

    @property
    def num_seqs(self) -> int:
        """Columns of the matrix."""
        return self.decodes + self.prompts

    @property
    def has_guesses(self) -> bool:
        """Whether it is for sequences with guesses."""
        return False

    def holds(self, step: PackedStep) -> bool:
        """Whether a step fits."""
        num_prompts = step.num_seqs - step.num_decodes
        return len(step.tokens) <= self.tokens and step.num_decodes <= self.decodes and num_prompts < self.prompts


class PromptGraphs:
    """The recorded steps. All leave their result in one place, from which it must be read before the next one runs."""

    def __init__(self, setup: EngineSetup, runner: ModelRunner, tables: DeviceTables, recorder: Recorder) -> None:
        self._setup = setup
        self._runner = runner
        self._tables = tables
        self._recorder = recorder
        self.rooms: list[Room] = []  # what steps may use by now, small ones first
        self._graphs: dict[Room, StepGraph] = {}
        self._last_hidden = torch.empty(0)  # [sequences, H]

    def largest(self) -> float:
        """Return the most tokens that will be recorded, as a part of the largest step there can be."""
        return max((room.tokens for room in self._wanted()), default=0) / self._setup.max_num_batched_tokens

    def open(self) -> None:
        """Let steps be recorded from now on. On a GPU record all, the largest first, so that all others fit into its memory."""
        self.rooms = self._wanted()
        self._last_hidden = self._hidden_of_largest()
        if self._setup.device.type == "cuda":
            silent = not self._setup.config.use_tqdm
            for room in tqdm(self.rooms[::-1], desc="Capturing graphs of prompts", disable=silent):
                self.graph(room)

    def rehearse(self) -> None:
        """Do all the work that will be recorded, once."""
        self._last_hidden = self._hidden_of_largest()
        for room in self._wanted():
            self._compute(room, torch.from_numpy(self._nothing_in(room)).to(self._setup.device))

    def _hidden_of_largest(self) -> torch.Tensor:
        """Make the place for the hidden states of any room."""
        most, width = (
            max((room.num_seqs for room in self._wanted()), default=0),
            self._runner.model.lm_head.weight.shape[1],
        )
        return torch.zeros(most, width, dtype=self._setup.dtype, device=self._setup.device)

    def pad(self, step: PackedStep) -> tuple[Room | None, Int32]:
        """Return the smallest room that holds the step, and its numbers there. None if there is no such room, or if the
        hidden states of all its tokens are needed."""
        room = None if step.scores.size else next((room for room in self.rooms if room.holds(step)), None)
        return room, pad(step, room, self._setup.max_num_seqs) if room else np.empty(0, np.int32)

    def logits(self, step: PackedStep, flat: torch.Tensor, room: Room, padded: torch.Tensor) -> torch.Tensor:
        """Run a step. `flat` is its buffer, and `padded` its numbers in the room, both on the device. Returns [S, V]."""
        self._tables.enter_blocks(step, flat)
        self.graph(room).replay(padded)
        logits: torch.Tensor = self._runner.model.lm_head(self._last_hidden[: step.num_seqs])
        return logits

    def _wanted(self) -> list[Room]:
        return rooms_for(self._setup) if self._runner.supports_prompt_graph() else []

    def graph(self, room: Room) -> StepGraph:
        """Return the recorded step. Records it now, with nothing but padding, if it is not yet there."""
        if room not in self._graphs:
            self._graphs[room] = self._recorder.record(
                self._nothing_in(room), lambda numbers: self._compute(room, numbers)
            )
        return self._graphs[room]

    def _nothing_in(self, room: Room) -> Int32:
        """The numbers of a step that is nothing but padding."""
        nothing = np.zeros(len(Line) * room.num_seqs + room.tokens, np.int32)
        nothing[: room.num_seqs] = self._setup.max_num_seqs
        nothing[(Line.QUERY_LEN + 1) * room.num_seqs - 1] = room.tokens
        return nothing

    def _compute(self, room: Room, numbers: torch.Tensor) -> None:
        """The work that is recorded."""
        lines = numbers[: len(Line) * room.num_seqs].view(len(Line), -1)
        rows, seq_lens, query_lens, last = lines
        ids, positions, slots, starts, tables = self._tables.unpack_ragged(
            rows, seq_lens, query_lens, numbers[lines.numel() :]
        )
        on_cpu = numbers.device.type == "cpu"
        batch = ForwardBatch(
            input_ids=ids,
            positions=positions,
            slot_mapping=slots,
            query_start_loc=starts,
            seq_lens=seq_lens,
            block_tables=tables,
            logits_indices=last,
            num_seqs=room.num_seqs,
            num_decodes=room.decodes,
            max_query_len=room.tokens,
            max_seq_len=self._setup.max_model_len,
            query_lens_host=query_lens.tolist() if on_cpu else [],
            seq_lens_host=seq_lens.tolist() if on_cpu else [],
            is_padded=True,
            has_guesses=room.has_guesses,
        )
        hidden = self._runner.forward_hidden(batch)
        torch.index_select(hidden, 0, last, out=self._last_hidden[: room.num_seqs])


def rooms_for(setup: EngineSetup) -> list[Room]:
    """What to record on a device; nothing on a CPU, where launching is not what takes the time."""
    return rooms(setup.max_num_seqs, setup.max_num_batched_tokens) if setup.device.type == "cuda" else []


def rooms(max_num_seqs: int, budget: int) -> list[Room]:
    """Rooms for steps of up to `budget` tokens, small ones first."""
    tokens = [n for n in TOKENS if n < budget] + [budget] * (budget <= TOKENS[-1])
    decodes = [n for n in DECODES if n < max_num_seqs] + [max_num_seqs]
    return [Room(t, d) for t in tokens for d in decodes if d <= t]


def pad(step: PackedStep, room: Room, padding_row: int) -> Int32:
    """Lay a step out in a room that holds it: the matrix [len(Line), num_seqs], then the tokens."""
    numbers = np.zeros(len(Line) * room.num_seqs + room.tokens, np.int32)
    lines, tokens = numbers[: -room.tokens].reshape(len(Line), -1), numbers[-room.tokens :]
    d, n, fields = step.num_decodes, step.num_seqs, step.fields
    for here, there in (slice(0, d), slice(0, d)), (slice(d, n), slice(room.decodes, room.decodes + n - d)):
        lines[: Line.LAST, there] = fields[[Field.ROW, Field.SEQ_LEN, Field.QUERY_LEN], here]
    lines[Line.ROW][lines[Line.SEQ_LEN] == 0] = padding_row
    lines[Line.QUERY_LEN, -1] = room.tokens - len(step.tokens)
    lines[Line.LAST, :n] = fields[Field.QUERY_LEN].cumsum() - 1
    tokens[: len(step.tokens)] = step.tokens
    return numbers
