"""Recorded steps with guesses: as those with prompts, but of each sequence any number of tokens may be drawn after.

Such a step is one recording, from the step to its tokens. Where answers have a form it is two, so that masks can be made on
the host while the device is at the first: from the step to the logits of all draws, and from there to the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from folovllm.draw_row import mask_width
from folovllm.sample.draw_state import DrawState
from folovllm.sample.rules import bits_of
from folovllm.setup import EngineSetup
from folovllm.spec_decode.draft_tokens import DraftTokens
from folovllm.spec_decode.verify import Draws, Ints, most_draws
from folovllm.step.masks import Masks
from folovllm.step.packed import Field, Int32, PackedStep
from folovllm.worker.draw import StepDraw
from folovllm.worker.host_ring import HostRing
from folovllm.worker.prompt_graphs import Line, PromptGraphs, Room
from folovllm.worker.step_graph import StepGraph

Work = tuple[Callable[[torch.Tensor], None], Int32]  # what is recorded, and its input when there is nothing to do
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
    """The recorded steps. What the first graph leaves are the logits of all tokens after which one is drawn."""

    def __init__(
        self, *rest: Any, steps_in: HostRing, draw: StepDraw, rows_draw: DrawState, tokens: torch.Tensor,
        drafted: DraftTokens | None,
    ) -> None:  # fmt: skip
        """How steps come to the device, how they draw, and where their tokens [R] go; `rest`: as `PromptGraphs`."""
        super().__init__(*rest)
        self._steps_in, self._draw, self._rows_draw, self._tokens = steps_in, draw, rows_draw, tokens
        self._drafted = drafted
        self._logits = self._kept_free = torch.empty(0)  # [R, V]
        self._recordings: dict[tuple[Room, str], StepGraph] = {}  # beside those of steps without a draw

    def room_for(self, step: PackedStep) -> Room | None:
        """The smallest room that holds a step; None if there is none, or if it has more to do than to check guesses."""
        if step.scores.size or step.draws.num_rows:
            return None
        needed = max(len(step.tokens), step.updates.shape[1])
        return next((room for room in self.rooms if needed <= room.tokens), None)

    def replay(self, step: PackedStep, draws: Draws, room: Room) -> torch.Tensor:
        """Run a step as far as its logits [R, V], one line for each draw."""
        self.graph(room).replay(self._steps_in.stage(lay_out(step, draws, room, self._setup.max_num_seqs)))
        self._steps_in.mark()
        return self._logits[: len(draws.token)]

    def replay_whole(self, step: PackedStep, draws: Draws, by_draw: PackedStep, room: Room) -> torch.Tensor:
        """`replay`, and draw for all without a mask. `by_draw` has a column for each draw."""
        numbers = lay_out(step, draws, room, self._setup.max_num_seqs)
        lines = self._lines_of_draws(by_draw, room)
        self._recorded(room, self._whole_work).replay(self._steps_in.stage(np.concatenate([lines.ravel(), numbers])))
        self._steps_in.mark()
        return self._logits[: len(draws.token)]

    def replay_draw(self, by_draw: PackedStep, room: Room, masks: Masks) -> None:
        """Draw for a step that `replay` has run, all at once. `by_draw` has a column for each draw."""
        lines, bits = self._lines_of_draws(by_draw, room), self._no_masks(room)
        at = slice(by_draw.num_seqs) if len(masks.rows) == by_draw.num_seqs else draws_of(masks, by_draw)
        lines[2, at], bits[at] = masks.rows, masks.bits
        self._recorded(room, self._draw_work).replay(
            self._steps_in.stage(np.concatenate([lines.ravel(), bits.ravel()]))
        )
        self._steps_in.mark()

    def open(self) -> None:
        """As `PromptGraphs`."""
        self._kept_free = torch.empty(0)
        super().open()
        if self._setup.device.type == "cuda":
            for room in self.rooms[::-1]:
                for make in self._works():
                    self._recorded(room, make)

    def rehearse(self) -> None:
        """As `PromptGraphs`."""
        super().rehearse()
        for room in self._wanted():
            for make in self._works():
                work, numbers = make(room)
                work(torch.from_numpy(numbers).to(self._setup.device))

    def make_room(self) -> None:
        """Make the place for the logits of any room, and take as much again for what masks leave of them, until that is made.

        Called before the KV cache is sized.
        """
        most = max((room.tokens for room in self._wanted()), default=0)
        lm_head, setup = self._runner.model.lm_head, self._setup
        self._logits = torch.zeros(most, len(lm_head.weight), dtype=setup.dtype, device=setup.device)
        self._kept_free = torch.empty_like(self._logits)

    def _wanted(self) -> list[Room]:
        return check_rooms(self._setup) if self._runner.supports_prompt_graph() else []

    def _nothing_in(self, room: Room) -> Int32:
        blocks = np.zeros((3, room.tokens), np.int32)
        blocks[0] = self._setup.max_num_seqs
        return np.concatenate([super()._nothing_in(room), blocks.ravel()])

    def _compute(self, room: Room, numbers: torch.Tensor) -> None:
        """The work of the first recording: enter new blocks, run the model, and make logits."""
        row, column, block = numbers[-3 * room.tokens :].view(3, -1)
        self._tables.block_tables[row.long(), column.long()] = block
        if self._drafted is not None:
            self._drafted.spell_on_device(numbers[-4 * room.tokens : -3 * room.tokens])
        super()._compute(room, numbers[: -3 * room.tokens])
        self._runner.model.lm_head(self._last_hidden[: room.tokens], self._logits[: room.tokens])

    def _lines_of_draws(self, by_draw: PackedStep | None, room: Room) -> Int32:
        """Rows, positions, rows with masks (none): [3, tokens]. Without a step, all of them padding."""
        lines = np.full((3, room.tokens), -1, np.int32)
        lines[:], lines[1] = self._setup.max_num_seqs, 0
        if by_draw is not None:
            lines[:2, : by_draw.num_seqs] = by_draw.fields[[Field.ROW, Field.SEQ_LEN]]
        return lines

    def _no_masks(self, room: Room) -> Int32:
        return np.full((room.tokens, mask_width(self._setup.vocab_size)), -1, np.int32)

    def _works(self) -> tuple[Callable[[Room], Work], ...]:
        """What is recorded of a room, beside the step without a draw."""
        return self._draw_work, self._whole_work

    def _recorded(self, room: Room, make: Callable[[Room], Work]) -> StepGraph:
        """The recording of the work that `make` makes for a room. Records it now if it is not yet there."""
        key = room, make.__name__
        if key not in self._recordings:
            work, numbers = make(room)
            self._recordings[key] = self._recorder.record(numbers, work)
        return self._recordings[key]

    def _draw_work(self, room: Room) -> Work:
        """The second of two recordings: draw after each token of a room.

        Where a draw has a mask, the one of its row rules nothing out.
        """

        def draw(numbers: torch.Tensor) -> None:
            rows, positions, masked = numbers[: 3 * room.tokens].view(3, -1)
            logits = self._draw.whole(self._logits[: room.tokens])
            self._rows_draw.masks.index_fill_(0, masked.long(), -1)
            logits = without_masked(logits, numbers[3 * room.tokens :].view(room.tokens, -1))
            self._rows_draw.draw(logits, rows, positions, self._tokens)

        return draw, np.concatenate([self._lines_of_draws(None, room).ravel(), self._no_masks(room).ravel()])

    def _whole_work(self, room: Room) -> Work:
        """A whole step: compute it, and draw after each of its tokens."""

        def whole(numbers: torch.Tensor) -> None:
            rows, positions, _ = numbers[: 3 * room.tokens].view(3, -1)
            self._compute(room, numbers[3 * room.tokens :])
            self._rows_draw.draw(self._draw.whole(self._logits[: room.tokens]), rows, positions, self._tokens)

        return whole, np.concatenate([self._lines_of_draws(None, room).ravel(), self._nothing_in(room)])


def without_masked(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """The logits [n, V] with -inf where the masks [n, ceil(V / 32)] int32 have no bit."""
    if logits.is_cuda:
        from folovllm.kernels.mask_logits import mask_logits

        return mask_logits(logits, masks)
    return logits.masked_fill(~bits_of(masks, logits.shape[1]), -torch.inf)


def draws_of(masks: Masks, by_draw: PackedStep) -> Ints:
    """Which of the draws of a step have a mask, [n]."""
    return np.isin(by_draw.fields[Field.ROW], masks.rows).nonzero()[0]


def lay_out(step: PackedStep, draws: Draws, room: Room, padding_row: int) -> Int32:
    """The input of the first recording: the matrix [len(Line), num_seqs], the tokens, new blocks [3, tokens]."""
    n, seqs, tokens = step.num_seqs, room.num_seqs, len(step.tokens)
    first = len(Line) * seqs
    numbers = np.zeros(first + 4 * room.tokens, np.int32)
    lines, blocks = numbers[:first].reshape(len(Line), -1), numbers[first + room.tokens :].reshape(3, -1)
    lines[Line.ROW, n:] = blocks[0] = padding_row
    lines[: Line.LAST, :n] = step.fields[Field.ROW : Field.QUERY_LEN + 1]
    lines[Line.QUERY_LEN, -1] = room.tokens - tokens
    lines[Line.LAST, : len(draws.token)] = draws.token
    numbers[first : first + tokens] = step.tokens
    blocks[:, : step.updates.shape[1]] = step.updates
    return numbers


def check_rooms(setup: EngineSetup) -> list[Room]:
    """What to record on a device, small ones first; nothing on a CPU."""
    return rooms(most_draws(setup.max_num_seqs)) if setup.device.type == "cuda" else []


def rooms(most: int) -> list[Room]:
    """Rooms for up to `most` draws."""
    return [CheckRoom(n, 0) for n in (*[n for n in TOKENS if n < most], min(most, TOKENS[-1]))]
