"""The hook for what a token may be: the engine asks it before a step samples, and tells it what was sampled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as SequenceOf

from folovllm.engine.event_stream import Events
from folovllm.engine.events import GivenUp
from folovllm.request import Sequence, SequenceOutput, SequenceStatus
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.schedule import SchedulerOutput

logger = logging.getLogger("folovllm")


class LogitsMask:
    """Which tokens each sequence may go on with. This one allows all; a grammar (X1) allows some.

    The engine calls `add` once a request. A step is then `needs_mask`, `bitmasks` if that was True, `accept_tokens` with what was
    sampled, and `broken`. Where steps overlap, `needs_mask` of a step comes before `accept_tokens` of the one before it, and its
    `bitmasks` behind that. So a mask keeps its own account of what was sampled: a sequence's tokens may be a step behind.
    Speculative decoding calls `trim` and `forced` before a step. Nobody says when a sequence ends: hold it weakly.
    """

    def add(self, seqs: SequenceOf[Sequence]) -> None:
        """Begin with the sequences of a new request. Raises ValueError if what it asks for cannot be had."""
        if seqs[0].params.structured_outputs is not None:
            raise ValueError("structured_outputs needs folovllm/electives/structured_output, which is not installed")

    def needs_mask(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> bool:
        """Whether a step samples for any sequence that may not have every token. `seqs`: those of the step, in order."""
        return False

    def bitmasks(self, output: SchedulerOutput, seqs: SequenceOf[Sequence]) -> TokenBitmasks:
        """The tokens that such sequences may have in the step, a bit for each token, for every position that is sampled.

        A sequence with `num_samples` above 1 is sampled behind its first token and behind each draft token, `token_ids[1:]`.
        """
        raise NotImplementedError("no sequence is concerned")

    def accept_tokens(self, seqs: Iterable[Sequence], token_ids: Iterable[list[int]]) -> None:
        """Note what a step sampled, before the sequences get it; cut off, in the lists of `token_ids`, what does not count.

        A list is empty where a chunk of a prompt samples nothing; a sequence may have finished meanwhile.
        """

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


def abort_broken(
    mask: LogitsMask, abort: Callable[..., None], events: Events, seqs: SequenceOf[Sequence]
) -> list[SequenceOutput]:
    """Abort the answers of a step that can no longer satisfy their grammar, with finish_reason "abort", and return their ends."""
    broken = mask.broken(seqs)
    for seq in broken:
        logger.warning("request %s ends early: its answer can no longer satisfy its grammar", seq.request_id)
        if events.on:
            events.emit(GivenUp(seq.seq_id))
    abort(*broken)
    return [SequenceOutput(seq, [], SequenceStatus.FINISHED_ABORTED) for seq in broken]
