"""Answers without text: of a request that wants none, and of one whose text cannot be made."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.request import SequenceStatus

if TYPE_CHECKING:
    from folovllm.engine.output_processor import RequestState
    from folovllm.outputs import RequestOutput

logger = logging.getLogger("folovllm")


class NoText(IncrementalDetokenizer):
    """For a request that wants no text."""

    def __init__(self) -> None:
        super().__init__(lambda _: "")

    def append(self, token_id: int) -> None:
        """Nothing is kept."""


def without_text(state: RequestState) -> RequestOutput:
    """Log the exception that a request's output has raised. Returns the request as aborted: its tokens, and no text."""
    logger.exception("request %s ends: its output cannot be made", state.request_id)
    for answer in state.answers:
        answer.seq.status, answer.seq.detokenizer = SequenceStatus.FINISHED_ABORTED, NoText()
        answer.update([], has_ended=True)
    return state.output()
