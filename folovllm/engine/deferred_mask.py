"""The mask of structured output, which is made with the first request for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from folovllm.engine.logits_mask import LogitsMask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class DeferredMask:
    """A `LogitsMask` that allows all until a request asks for structured output; from then on it is the one that `make` returns."""

    def __init__(self, all_allowed: LogitsMask, make: Callable[[], LogitsMask]) -> None:
        self._mask = all_allowed
        self._make = cache(make)

    def add(self, seqs: Sequence[Any]) -> None:
        """Begin with the sequences of a new request."""
        if seqs[0].params.structured_outputs is not None:
            self._mask = self._make()
            self._mask.add(seqs)

    def prepare(self, model_end_ids: Collection[int]) -> None:
        """Do now what the first request would wait for."""
        self._mask = self._make()
        self._mask.prepare(model_end_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mask, name)


def make_logits_mask(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> LogitsMask:
    """The mask of structured output (X1), imported with the first request for it."""

    def make() -> LogitsMask:
        from folovllm.plugins import LOGITS_MASK, is_installed, named

        return named(LOGITS_MASK)(tokenizer, vocab_size) if is_installed(LOGITS_MASK) else LogitsMask()

    return cast("LogitsMask", DeferredMask(LogitsMask(), make))
