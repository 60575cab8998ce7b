"""Answers without text: of a request that wants none, and of one whose text cannot be made."""

from __future__ import annotations

import logging
from typing import Any

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.outputs import RequestOutput
from folovllm.request import SequenceStatus

logger = logging.getLogger("folovllm")


class NoText(IncrementalDetokenizer):
    """For a request that wants no text."""

    def __init__(self) -> None:
        super().__init__(lambda _: "")

    def append(self, token_id: int) -> None:
        """Nothing is kept."""


def without_text(state: Any) -> RequestOutput:
    """Log the exception that the output of a `RequestState` has raised. Returns the request as aborted: its tokens, and no text."""
    logger.exception("request %s ends: its output cannot be made", state.request_id)
    for answer in state.answers:
        answer.seq.status, answer.seq.detokenizer = SequenceStatus.FINISHED_ABORTED, NoText()
        answer.update([], has_ended=True)
    output: RequestOutput = state.output()
    return output
