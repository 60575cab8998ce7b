"""A `GraphRunner` whose packed steps may check guesses: shares that draw several tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from folovllm.draw_row import BAD, WORDS, RowField, mask_width
from folovllm.sample.logprobs import by_share
from folovllm.setup import EngineSetup
from folovllm.spec_decode.check_graphs import CheckGraphs, draws_of, without_masked
from folovllm.spec_decode.draft_tokens import DraftTokens
from folovllm.spec_decode.verify import NO_GUESS, Draws, accept, most_draws
from folovllm.step.draw import DrawSpec, Logprobs
from folovllm.step.masks import Masks
from folovllm.step.packed import NO_SCORES, Field, Int32, PackedStep, StepPacker
from folovllm.step.schedule import SchedulerOutput, StepResult
from folovllm.worker.graph_runner import GraphRunner
from folovllm.worker.model_runner import ModelRunner
from folovllm.worker.pending_step import Computed, PendingStep
from folovllm.worker.prompt_graphs import Room
from folovllm.worker.warm_up import FILTERED, doublings, dummy_shares

NO_FIELDS = torch.empty(len(Field), 0, dtype=torch.int32)


@dataclass(slots=True, frozen=True, eq=False, kw_only=True)
class CheckedStep(Computed):
    """A step with guesses that has the logits [R, V] of all its draws. `step` and `fields` have a column for each draw."""

    whole: PackedStep  # a column for each share
    draws: Draws
    room: Room | None = None  # of a recorded step; its `fields` are on the host alone
    has_drawn: bool = False  # in the same recording


class PendingGuesses(PendingStep):
    """A started step with guesses, of whose draws another one knows. Which of them count is decided on the host."""

    def __init__(self, drawn: PendingStep, checked: CheckedStep, drafted: DraftTokens | None) -> None:
        """`drafted` knows what guesses are named."""
        self._drawn, self._whole, self._draws, self._scores = drawn, checked.whole, checked.draws, checked.scores
        self._drafted = drafted

    def is_here(self) -> bool:
        """As `PendingStep`."""
        return self._drawn.is_here()

    def wait(self) -> StepResult:
        """As `PendingStep`."""
        every, draws = self._drawn.wait(), self._draws
        guessed = draws.guess if self._drafted is None else self._drafted.spell(draws.guess)
        drawn: list[list[int]] = [[] for _ in range(self._whole.num_seqs)]
        guesses: list[list[int]] = [[] for _ in drawn]
        for i, (token,), guess in zip(draws.share.tolist(), every.token_ids, guessed.tolist(), strict=True):
            drawn[i].append(token)
            if guess != NO_GUESS:
                guesses[i].append(guess)
        kept = [accept(tokens, own) if tokens else [] for tokens, own in zip(drawn, guesses, strict=True)]
        logprobs: dict[int, list[Logprobs]] = {}
        if self._scores is not None:
            logprobs = by_share(self._scores, self._whole.scores.T.tolist())
        for r, rows in every.logprobs.items():
            if draws.level[r] < len(kept[i := int(draws.share[r])]):
                logprobs.setdefault(i, []).extend(rows)
        return StepResult(kept, logprobs)


class VerifyingGraphRunner(GraphRunner):
    """Draws after all tokens of a share with guesses. Steps without guesses are those of a `GraphRunner`.

    Draws are made all at once, with a mask for each where an answer has a form. Where a draw depends on the tokens before
    it, by a penalty say, the second draws of all shares come after the first, and so on; what is drawn behind a wrong guess
    leaves no trace in the rows' words.
    """

    def __init__(
        self, setup: EngineSetup, runner: ModelRunner, *others: Any, drafted: DraftTokens | None = None
    ) -> None:
        """As `GraphRunner`. `drafted` has the tokens of guesses that steps bring by name."""
        super().__init__(setup, runner, *others)
        self._drafted = drafted
        self._tokens = self._tokens.new_zeros(most_draws(setup.max_num_seqs))  # what the step drew
        self._checks = CheckGraphs(
            setup, runner, self._tables, self._recorder, steps_in=self._steps_in, draw=self._draw,
            rows_draw=self._rows_draw, tokens=self._tokens, drafted=drafted,
        )  # fmt: skip
        self._remembers = np.zeros(setup.max_num_seqs + 1, bool)  # rows whose draws depend on the tokens before them

    def _reserve_logits(self) -> None:
        super()._reserve_logits()
        self._checks.make_room()

    def compile_kernels(self) -> None:
        """As `GraphRunner`, with guesses too."""
        super().compile_kernels()
        self._warm_up(steps_with_guesses(self._setup))
        self._warm_up_forms()

    def _warm_up_forms(self) -> None:
        """Draw twice in a step that stops at its logits, as an answer with a form does."""
        (share,) = dummy_shares([2], self._setup.block_size, DrawSpec(has_form=True))
        step = StepPacker(self._setup.max_num_seqs, []).pack(SchedulerOutput((share._replace(num_draws=2),)))
        step.draws_late = True
        bits = np.full((2, mask_width(self._setup.vocab_size)), -1, np.int32)
        with torch.inference_mode():
            self.execute_model(step)
            self._draw_late(Masks(np.zeros(2, np.int32), bits)).wait()

    def _rehearse_graphs(self) -> None:
        super()._rehearse_graphs()
        self._checks.rehearse()

    def capture_cudagraph(self) -> None:
        """As `GraphRunner`, with guesses too."""
        super().capture_cudagraph()
        self._checks.open()

    def _compute(self, step: PackedStep) -> Computed:
        if step.is_decode or step.fields[Field.NUM_DRAWS].max() < 2:
            return super()._compute(step)
        query_lens, num_draws, ends = step.fields[[Field.QUERY_LEN, Field.NUM_DRAWS, Field.SEQ_LEN]].astype(np.int64)
        draws = Draws.of(query_lens, num_draws, ends, step.tokens)
        if len(draws.token) > len(self._tokens):
            raise RuntimeError(f"a step draws {len(draws.token)} tokens, and there is room for {len(self._tokens)}")
        by_draw, room = spread(step, draws), self._checks.room_for(step)
        if room is not None:
            at_once = not (step.draws_late or self._remembers[by_draw.fields[Field.ROW]].any())
            if at_once:
                logits = self._checks.replay_whole(step, draws, by_draw, room)
            else:
                logits = self._checks.replay(step, draws, room)
            return CheckedStep(
                step=by_draw, logits=logits, fields=NO_FIELDS, whole=step, draws=draws, room=room, has_drawn=at_once
            )
        places = draws.token.astype(np.int32)
        flat, more = self._upload(step, np.concatenate([by_draw.fields.ravel(), places]))
        fields, at = more.split([by_draw.fields.size, len(places)])
        if self._drafted is not None:
            self._drafted.spell_on_device(flat[step.fields.size :][: len(step.tokens)])
        batch = self._tables.unpack_mixed(step, flat)
        batch.logits_indices, batch.only_last = at.long(), False
        logits, scores = self._logits_and_scores(step, batch)
        fields = fields.view(by_draw.fields.shape)
        return CheckedStep(step=by_draw, logits=logits, fields=fields, scores=scores, whole=step, draws=draws)

    def _draw_late(self, masks: Masks) -> PendingStep:
        if not isinstance(self._late, CheckedStep):
            return super()._draw_late(masks)
        checked, self._late = self._late, None
        self._draw_special(checked, masks)
        return self._pending(checked)

    def _draw_step(self, computed: Computed, is_special: bool) -> None:
        if isinstance(computed, CheckedStep) and (is_special or computed.room is not None):
            if not computed.has_drawn:
                self._draw_special(computed, None)
        else:
            super()._draw_step(computed, is_special)

    def _upload(self, step: PackedStep, numbers: Int32) -> tuple[torch.Tensor, torch.Tensor]:
        lines = step.draws.buffer[: step.draws.num_rows * (1 + len(RowField))].reshape(-1, 1 + len(RowField))
        self._remembers[lines[:, 0]] = lines[:, 1 + RowField.FLAGS] & (WORDS | BAD) != 0
        return super()._upload(step, numbers)

    def _draw_special(self, checked: CheckedStep, masks: Masks | None) -> None:
        """Draw with all that each row asks for. Nothing waits for the device."""
        if self._remembers[checked.step.fields[Field.ROW]].any():
            self._draw_levels(checked, masks)
            return
        if checked.room is not None and masks is not None:
            self._checks.replay_draw(checked.step, checked.room, masks)
            return
        logits, fields = self._draw.whole(checked.logits), checked.fields
        rows, positions = fields[Field.ROW], fields[Field.SEQ_LEN]
        if masks is not None:
            logits = self._masked(logits, checked, masks)
        self._rows_draw.draw(logits, rows, positions, self._tokens)

    def _masked(self, logits: torch.Tensor, checked: CheckedStep, masks: Masks) -> torch.Tensor:
        """The logits [R, V] without what the masks of these draws rule out; the rows' own masks rule out nothing then."""
        at = draws_of(masks, checked.step).astype(np.int32)
        numbers = self._steps_in.to_device(np.concatenate([at, masks.rows, masks.bits.ravel()]))
        index, rows, bits = numbers.split([len(at), len(masks.rows), masks.bits.size])
        self._rows_draw.masks[rows.long()] = -1
        return logits.index_put((index.long(),), without_masked(logits[index.long()], bits.view(masks.bits.shape)))

    def _draw_levels(self, checked: CheckedStep, masks: Masks | None) -> None:
        """Draw one level after the other."""
        draws, whole, fields = checked.draws, self._draw.whole(checked.logits), checked.fields
        if checked.room is not None:
            fields = self._steps_in.to_device(checked.step.fields.ravel()).view(checked.step.fields.shape)
        share, guess = self._steps_in.to_device(np.stack([draws.share, draws.guess]).astype(np.int32).ravel()).view(
            2, -1
        )
        if self._drafted is not None:
            self._drafted.spell_on_device(guess)
        right = torch.ones(checked.whole.num_seqs, dtype=torch.int32, device=whole.device)
        for level, at in enumerate(draws.levels()):
            if masks is not None and len((own := masks.of_level(level)).rows):
                numbers = self._steps_in.to_device(np.concatenate([own.rows, own.bits.ravel()]))
                self._rows_draw.set_masks(numbers[: len(own.rows)], numbers[len(own.rows) :].view(own.bits.shape))
            index = self._steps_in.to_device(at.astype(np.int32)).long()
            rows, positions = fields[Field.ROW, index], fields[Field.SEQ_LEN, index]
            drawn = self._rows_draw.draw(whole[index], rows, positions)
            self._tokens[index] = drawn
            of = share[index].long()
            self._rows_draw.note(drawn, rows, positions, right[of])
            right[of] &= (drawn == guess[index]).int()

    def _pending(self, computed: Computed) -> PendingStep:
        if not isinstance(computed, CheckedStep):
            return self._sent(computed)
        drawn = computed if computed.scores is None else replace(computed, scores=None)
        return PendingGuesses(self._sent(drawn), computed, self._drafted)


def spread(step: PackedStep, draws: Draws) -> PackedStep:
    """What a draw needs of a step, with a column for each draw: its SEQ_LEN is the position of the token to draw."""
    fields: Int32 = step.fields[:, draws.share]
    fields[Field.SEQ_LEN] = draws.position
    fields[[Field.QUERY_LEN, Field.NUM_DRAWS]] = 1
    asked = {int(i): int(count) for i, count in step.logprobs.T}
    logprobs = [(r, asked[i]) for r, i in enumerate(draws.share.tolist()) if i in asked]
    return replace(
        step,
        fields=fields,
        num_seqs=len(draws.share),
        logprobs=np.array(logprobs, np.int32).reshape(-1, 2).T,
        scores=NO_SCORES,
    )


def steps_with_guesses(setup: EngineSetup) -> Iterator[SchedulerOutput]:
    """Small steps in which a sequence draws 2, 4, 8, ... tokens, plainly and with a filter."""
    longest = min(setup.max_model_len, setup.max_num_batched_tokens, most_draws(setup.max_num_seqs))
    for n in doublings(longest)[1:]:
        for draw in FILTERED, DrawSpec():
            (share,) = dummy_shares([n], setup.block_size, draw)
            yield SchedulerOutput((share._replace(num_draws=n),))
