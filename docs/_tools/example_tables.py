"""Tables about A, B and C (`milestones/running_example.json`), from the live engine. `excerpts.py` writes them into the pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from anatomy import table
from pictures import run

from folovllm.cache.slot_manager import SlotManager
from folovllm.step.schedule import SamplingSpec, ScheduledSequence
from folovllm.worker.input_batch import InputBatch
from milestones.running_example import Run, Turn, example

MILESTONES = ("m1", "m2", "m3", "m4", "m5", "m6")


def requests_table() -> str:
    """The three requests."""
    rows = [
        (
            f"**{request.name}**",
            f"step {request.turn}",
            f"`{request.prompt}`",
            len(request.prompt_token_ids),
            request.max_tokens,
            f"`{request.answer.strip()}`",
        )
        for request in example().requests
    ]
    return table(" | comes before | prompt | tokens | answer's tokens | answer", *rows)


def ids_table() -> str:
    """The prompts as the model gets them."""
    word = lambda token: example().texts[token].replace(" ", "␣")  # noqa: E731
    rows = [
        (
            f"**{request.name}**",
            " ".join(f"`{word(token)}` {token} ·" for token in request.prompt_token_ids).rstrip(" ·"),
        )
        for request in example().requests
    ]
    return table(" | tokens of the prompt, with their ids", *rows)


def loop_table(count: int) -> str:
    """The first steps of M1, which serves A alone: what goes in, what is drawn."""
    rows, word = [], lambda token: example().texts[token].replace(" ", "␣")
    for turn in run("m1").turns[:count]:
        (scheduled,), (drawn,) = turn.scheduled_seqs, turn.drawn.values()
        ids = ", ".join(map(str, scheduled.token_ids))
        rows.append(
            (
                turn.number,
                f"{scheduled.start} to {scheduled.end - 1}" if scheduled.end > scheduled.start + 1 else scheduled.start,
                ids,
                scheduled.end,
                f"{drawn} `{word(drawn)}`",
            )
        )
    return table("step | positions | token ids that go in | K/V in the cache after it | sampled", *rows)


def _names(names: Iterable[str]) -> str:
    return " and ".join(names)


def _several(turn: Turn) -> bool:
    return len(turn.scheduled_seqs) > 1


Looks = tuple[Callable[[Turn, Run], object], Callable[[Turn], str]]  # when it is there, and how it looks
FIRSTS: dict[str, Looks] = {
    "a wait": (lambda turn, run: turn.refused, lambda turn: f"{_names(turn.refused)}: one request at a time"),
    "a wait for tokens": (
        lambda turn, run: "tokens" in turn.refused.values(),
        lambda turn: f"{_names(turn.refused)}: the prompts of A and B are 21 tokens, and a step takes 20",
    ),
    "a batch": (
        lambda turn, run: _several(turn),
        lambda turn: ", ".join(
            f"{scheduled.name} computes {scheduled.end - scheduled.start}" for scheduled in turn.scheduled_seqs
        ),
    ),
    "a wait for memory": (
        lambda turn, run: "blocks" in turn.refused.values(),
        lambda turn: f"{_names(turn.refused)}: both blocks are in use",
    ),
    "a block table": (
        lambda turn, run: any(len(held) > 1 for held in turn.after.tables.values()),
        lambda turn: ", ".join(f"{name} holds {list(held)}" for name, held in turn.after.tables.items()),
    ),
    "a preemption": (
        lambda turn, run: turn.preempted,
        lambda turn: f"{_names(turn.preempted)} gives its blocks back for {_names(turn.preempted.values())}",
    ),
    "a recomputation": (
        lambda turn, run: any(_again(scheduled.name, turn, run) and not turn.hits for scheduled in turn.scheduled_seqs),
        lambda turn: f"C computes its {turn.scheduled_seqs[-1].end} tokens in one step",
    ),
    "a chunk": (
        lambda turn, run: any(not scheduled.draws for scheduled in turn.scheduled_seqs),
        lambda turn: ", ".join(
            f"{s.name} computes {s.end - s.start} of 12 tokens" for s in turn.scheduled_seqs if not s.draws
        ),
    ),
    "a prefix hit": (
        lambda turn, run: turn.hits,
        lambda turn: ", ".join(f"{name} finds {hit} tokens of A in the cache" for name, hit in turn.hits.items()),
    ),
    "a return with cached blocks": (
        lambda turn, run: any(_again(name, turn, run) for name in turn.hits),
        lambda turn: ", ".join(f"{name} finds {hit} of its tokens in the cache" for name, hit in turn.hits.items()),
    ),
    "an overlap": (
        lambda turn, run: turn.scheduled_seqs and not turn.drawn,
        lambda turn: "the next step is planned before the tokens of this step are back",
    ),
}


def _again(name: str, turn: Turn, run: Run) -> bool:
    """Whether a request that gave way before comes back in this turn."""
    gone = [earlier.number for earlier in run.turns[: turn.number] if name in earlier.preempted]
    return (
        bool(gone) and name in turn.before.waiting and any(scheduled.name == name for scheduled in turn.scheduled_seqs)
    )


def firsts_table() -> str:
    """What happens to A, B and C, and where it happens first."""
    return table("what | first in | step | ", *firsts())


def firsts() -> list[tuple[str, str, int, str]]:
    """Of everything that may happen: what, first in which milestone, in which step, and how it looks there."""
    return [(what, *_first(*shown)) for what, shown in FIRSTS.items()]


def _first(is_there: Callable[[Turn, Run], object], looks: Callable[[Turn], str]) -> tuple[str, int, str]:
    found = (
        (milestone, turn) for milestone in MILESTONES for turn in run(milestone).turns if is_there(turn, run(milestone))
    )
    milestone, turn = next(found)
    return milestone.upper(), turn.number, looks(turn)


def batch_table(step: int) -> str:
    """The tensors of a step of M2, as the engine builds them."""
    milestone_run = run("m2")
    turn, size = milestone_run.turns[step], milestone_run.block_size
    scheduled_seqs = [
        ScheduledSequence(i, i, scheduled.start, scheduled.end, np.array(scheduled.token_ids, np.int32),
              turn.after.tables[scheduled.name], 0, int(scheduled.draws), SamplingSpec())
        for i, scheduled in enumerate(turn.scheduled_seqs)
    ]  # fmt: skip
    batch = InputBatch(SlotManager.slots, size, torch.device("cpu")).build(scheduled_seqs)
    of_tokens, of_sequences = (
        [(f"`{name}`", *getattr(batch, name)[: len(heads)].tolist()) for name in names]
        for names, heads in (
            (("input_ids", "positions", "slot_mapping"), batch.input_ids),
            (("query_start_loc", "seq_lens", "logits_indices"), scheduled_seqs),
        )
    )
    owners = [
        f"{scheduled.name}{p}" for scheduled in turn.scheduled_seqs for p in range(scheduled.start, scheduled.end)
    ]
    first = table(" | ".join(["a token each", *owners]), *of_tokens)
    return f"{first}\n\n{table(' | '.join(['a sequence each', *(scheduled.name for scheduled in turn.scheduled_seqs)]), *of_sequences)}"
