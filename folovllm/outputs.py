"""What a request gives back: text, tokens, log-probabilities and times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TokenLogprob:
    """A token with its log-probability under the model's own distribution (before any filter)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    decoded_token: str | None  # None where the request wants no text
    token_bytes: bytes | None = None  # those of the token, which may be a part of a character


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
        return _field(self, {"total_time": "latency", "throughput": "tokens_per_second"}.get(name, name))  # older names


@dataclass(slots=True)
class CompletionOutput:
    """One answer. While it streams, `delta_text` and `delta_token_ids` are what this step added.

    With `output_kind=DELTA` the text, the tokens and their log-probabilities are those of this step, too.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of all tokens so far, if the request asked for log-probabilities
    logprobs: list[dict[int, TokenLogprob]] | None = None  # by token id: the chosen first, then by rank
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    delta_text: str = ""
    delta_token_ids: list[int] = field(default_factory=list)

    def finished(self) -> bool:
        """Whether the answer is over."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt. `output["text"]` and the like read the first answer, as older code does.

    With `output_kind=DELTA` the first output alone has `prompt_logprobs`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    # For each token of the prompt a row as in `logprobs`, None for the first; None where nobody asked for them.
    prompt_logprobs: list[dict[int, TokenLogprob] | None] | None = None

    def __getitem__(self, name: str) -> Any:
        return _field(self if name in self.__slots__ else self.outputs[0], name)


def _field(record: object, name: str) -> Any:
    """Dictionary-style access to an attribute."""
    if name.startswith("_") or not hasattr(record, name):
        raise KeyError(name)
    return getattr(record, name)
