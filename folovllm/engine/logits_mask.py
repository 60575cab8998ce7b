"""The hook for what a token may be: the engine asks it before a step samples, and tells it what was sampled."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf

from folovllm.request import Sequence
from folovllm.step.masks import Masks
from folovllm.step.schedule import SchedulerOutput


class LogitsMask:
    """Which tokens each sequence may go on with. This one allows all; a grammar (X1) allows some.

    The engine calls `add` once a request, and then for each step `concern`, `masks` if that was True, and `advance`. With
    overlapping steps the masks of a step are made when `advance` has had all tokens before it.
    """

    def add(self, seqs: SequenceOf[Sequence]) -> None:
        """Begin with the sequences of a new request. Raises ValueError if what it asks for cannot be had."""
        if seqs[0].params.structured_outputs is not None:
            raise ValueError("structured_outputs needs folovllm/structured_output, which is not installed")

    def concern(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> bool:
        """Whether a step samples for any sequence that may not have every token. `seqs`: one for each share."""
        return False

    def masks(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> Masks:
        """The tokens that such sequences may have in the step, a bit for each token, for every position that is sampled."""
        raise NotImplementedError("no sequence is concerned")

    def advance(self, seqs: Iterable[Sequence], token_ids: Iterable[list[int]]) -> None:
        """Note what a step sampled; cut off, in `token_ids`, what does not count."""

    def broken(self, seqs: Iterable[Sequence]) -> list[Sequence]:
        """The sequences that no token can follow; they end with finish_reason "abort"."""
        return []

    def trim(self, seq: Sequence, draft: list[int]) -> list[int]:
        """The draft tokens, from the first on, that `seq` may have."""
        return draft

    def forced(self, seq: Sequence, most: int) -> list[int]:
        """Jump-forward tokens: at most so many that come next because nothing else may. Empty where there is a choice."""
        return []

    def prepare(self, model_end_ids: Collection[int]) -> None:
        """Do now what the first request would wait for. `model_end_ids`: the tokens that end a text."""
