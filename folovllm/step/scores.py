"""Which tokens of prompts a step scores: those whose log-probabilities their requests want."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Scores(NamedTuple):
    """Prompt tokens whose log-probabilities the request wants and this step computes."""

    first: int  # index in the sequence's new tokens of the token before the first of `token_ids`
    token_ids: npt.NDArray[np.int32]  # [n], a view
    num_top: int  # most likely tokens to report beside each


def tokens_to_score(scheduled_seqs: Sequence[Any]) -> list[tuple[int, int, int, int]]:
    """Return four numbers for each token that a step's `ScheduledSequence`s score: sequence index, index in the step of the token before it, id, `num_top`."""
    wanted, start = [], 0
    for i, scheduled in enumerate(scheduled_seqs):
        if (scores := scheduled.scores) is not None:
            ids = enumerate(scores.token_ids.tolist(), start + scores.first)
            wanted += [(i, after, token, scores.num_top) for after, token in ids]
        start += scheduled.num_new_tokens
    return wanted
