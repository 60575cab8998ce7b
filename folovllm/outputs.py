"""What a request gives back: text, tokens, log-probabilities and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TokenLogprob:
    """A token with its log-probability under the model's own distribution (before any filter)."""

    token_id: int
    logprob: float
    text: str


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of a monotonic clock.

    `ttft` (time to first token) runs from the arrival; `tpot` (time per output token) is the mean gap between the
    tokens after the first. Both are None until they exist.
    """

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token, over the tokens after the first."""
        if self.finish_time is None or self.first_token_time is None or self.num_generated_tokens < 2:
            return None
        return (self.finish_time - self.first_token_time) / (self.num_generated_tokens - 1)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the last token."""
        return None if self.finish_time is None else self.finish_time - self.arrival_time

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens over the whole latency."""
        return self.num_generated_tokens / self.latency if self.latency else None

    def __getitem__(self, name: str) -> Any:
        return _field(self, name)


@dataclass(slots=True)
class CompletionOutput:
    """One answer. While it streams, `delta_text` and `delta_token_ids` are what this step added."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[list[TokenLogprob]] | None = None  # per token: the chosen one first, then the most likely
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    delta_text: str = ""
    delta_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt. `output["text"]` and the like read the first answer, as older code does."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0

    def __getitem__(self, name: str) -> Any:
        return _field(self if name in self.__slots__ else self.outputs[0], name)


def _field(record: object, name: str) -> Any:
    """Dictionary-style access to an attribute."""
    if name.startswith("_") or not hasattr(record, name):
        raise KeyError(name)
    return getattr(record, name)
