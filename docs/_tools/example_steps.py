"""Tables about A, B and C in M4 to M6, from the live engine. `excerpts.py` writes them into the pages."""

from __future__ import annotations

from unittest.mock import patch

from anatomy import table
from pictures import run

from folovllm.engine.scheduler import Scheduler
from folovllm.step.packed import IN_FLIGHT, Field, PackedStep, StepPacker
from folovllm.step.schedule import SchedulerOutput
from milestones.running_example import Turn, play


def reads_table(number: int) -> str:
    """Which program of M4's kernels reads which blocks in a step."""
    turn, size, rows = run("m4").turns[number], run("m4").block_size, []
    for scheduled in turn.scheduled_seqs:
        blocks, rest = turn.after.tables[scheduled.name], scheduled.end - (-(-scheduled.end // size) - 1) * size
        is_decode = scheduled.end == scheduled.start + 1
        rows.append(
            (
                f"decode of {scheduled.name}, per KV head (2 programs)"
                if is_decode
                else f"prefill of {scheduled.name}, per head (4 programs)",
                f"position {scheduled.start}, for two query heads"
                if is_decode
                else f"positions {scheduled.start} to {scheduled.end - 1}",
                f"{', '.join(map(str, blocks))}; in block {blocks[-1]} only {rest} slot{'s' * (rest > 1)}",
            )
        )
    return table("program | its queries | blocks it reads, in this order", *rows)


def packed_steps(**overrides: int) -> list[tuple[bool, PackedStep]]:
    """M6's steps as they are sent, and whether tokens were awaited before."""
    found: list[tuple[bool, PackedStep]] = []
    pack, must_wait, waits = StepPacker.pack, Scheduler.must_wait, [False]

    def noted_wait(self: Scheduler) -> bool:
        waits.append(must_wait(self))
        return waits[-1]

    def noted(self: StepPacker, output: SchedulerOutput) -> PackedStep:
        found.append((waits[-1], pack(self, output)))
        return found[-1][1]

    with patch.object(StepPacker, "pack", noted), patch.object(Scheduler, "must_wait", noted_wait):
        play("m6", **overrides)
    return found


def sent_table() -> str:
    """How each of M6's steps is sent and started."""
    rows, turns = [], [turn for turn in run("m6").turns if turn.scheduled_seqs]
    for turn, (waited, step) in zip(turns, packed_steps(), strict=True):
        newest = []
        for i, scheduled in enumerate(turn.scheduled_seqs):
            if scheduled.end - scheduled.start > 1:
                newest.append(f"{scheduled.end - scheduled.start} of {scheduled.name}'s prompt")
            else:
                token = step.fields[Field.TOKEN, i] if step.is_decode else step.tokens[place(turn, i)]
                newest.append(f"{scheduled.name} {'`?`' if token == IN_FLIGHT else token}")
        width = step.fields.shape[1]
        rows.append(
            (
                turn.number,
                ", ".join(newest),
                f"decodes, {width} columns" if step.is_decode else "with a prompt",
                "yes" if waited else "no",
            )
        )
    return table("step | newest tokens | sent as | tokens awaited before", *rows)


def place(turn: Turn, index: int) -> int:
    """Where the tokens of a share begin, end to end."""
    return sum(scheduled.end - scheduled.start for scheduled in turn.scheduled_seqs[:index])


def fields_table(number: int) -> str:
    """A packed decode step, a column a sequence."""
    step, names = packed_steps()[number][1], [scheduled.name for scheduled in run("m6").turns[number].scheduled_seqs]
    columns = [*names, *["padding"] * (step.fields.shape[1] - len(names))]
    means = {
        Field.TOKEN: "−1 if it is in flight",
        Field.ROW: "where the device keeps this sequence's table, last token and sampling",
        Field.SEQ_LEN: "tokens in the cache after the step; the position follows from it",
        Field.NEW_BLOCK: "the block that begins with this token, if one does",
    }
    left_out = (Field.TEMPERATURE, Field.SEED_LOW, Field.SEED_HIGH)
    rows = [(f"`{f.name}`", *step.fields[f].tolist(), means.get(f, "")) for f in Field if f not in left_out]
    return table(" | ".join(["`Field`", *columns, ""]), *rows)
