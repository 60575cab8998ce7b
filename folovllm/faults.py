"""Faults of single requests: one ends the request that ran into it, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import length_hint
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from folovllm.outputs import RequestOutput
    from folovllm.request import Sequence

logger = logging.getLogger("folovllm")
Pair = tuple["Sequence", list[int]]  # a sequence, and the tokens that a step sampled for it


class RequestFailed(RuntimeError):
    """Requests ran into faults of their own and were ended; the log has each fault. All others go on.

    Attributes:
        request_ids: those that failed.
        outputs: what the step reports of the others.
    """

    def __init__(self, request_ids: Collection[str], outputs: Iterable[RequestOutput] = ()) -> None:
        super().__init__(f"the engine failed at request {', '.join(request_ids)}, and its log says how")
        self.request_ids, self.outputs = list(request_ids), list(outputs)


def require_fault(error: BaseException) -> None:
    """Raise `error` again if it cannot be the fault of one request or file, as KeyboardInterrupt cannot.

    A panic of a library in Rust can, although it is no `Exception`.
    """
    if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
        raise error


def log_fault(request_id: object, error: BaseException) -> None:
    """Log that a request failed. As `require_fault`, raises what cannot be its fault."""
    require_fault(error)
    logger.error("request %s failed", request_id, exc_info=error)


class Faults:
    """The faults of requests since they were reported last, by request id. The engine ends these requests."""

    def __init__(self) -> None:
        self.of: dict[str, BaseException] = {}

    def note(self, seq: Sequence, error: BaseException) -> None:
        """Log and keep the first fault of the request of `seq`. As `require_fault`, raises what cannot be its fault."""
        require_fault(error)
        if seq.request_id not in self.of:
            log_fault(seq.request_id, error)
            self.of[seq.request_id] = error

    @contextmanager
    def at(self, seq: Sequence) -> Iterator[None]:
        """A context: an exception in it is a fault of the request of `seq`, and goes no further."""
        try:
            yield
        except BaseException as error:
            self.note(seq, error)

    def each(self, work: Callable[[Iterable[Pair]], list[Sequence]], pairs: list[Pair]) -> list[Sequence]:
        """Return `work(pairs)`. If it raises at a pair, that is a fault of the pair's request; `work` gets the pairs behind it.

        `work` takes the pairs one by one. An exception before it takes one is raised.
        """
        rest, num_taken = iter(pairs), -1
        while True:
            try:
                updated = work(rest)
                return updated if num_taken < 0 else [seq for seq, tokens in pairs if tokens]
            except BaseException as error:
                before, num_taken = max(num_taken, 0), len(pairs) - length_hint(rest)
                if num_taken == before:
                    raise
                self.note(pairs[num_taken - 1][0], error)

    def report(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return `outputs`, the step's. Raises `RequestFailed`, which has them, if requests failed since the last time."""
        if not self.of:
            return outputs
        failed, self.of = self.of, {}
        others = [output for output in outputs if output.request_id not in failed]
        raise RequestFailed(failed, others) from next(iter(failed.values()))
