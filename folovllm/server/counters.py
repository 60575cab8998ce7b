"""What a server counts: requests, tokens and times, in plain Python. `folovllm.server.metrics` shows them to Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from folovllm.server.stream import Stream

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)


class Histogram:
    """How many values were at most each of some bounds. To note one costs a search among them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def note(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


def _seconds() -> Histogram:
    return Histogram(SECONDS)


def _tokens() -> Histogram:
    return Histogram(TOKENS)


@dataclass(slots=True)
class Counters:
    """What was counted since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # answers, by finish_reason
    time_to_first_token: Histogram = field(default_factory=_seconds)
    queue_time: Histogram = field(default_factory=_seconds)
    inter_token_latency: Histogram = field(default_factory=_seconds)
    time_per_output_token: Histogram = field(default_factory=_seconds)
    latency: Histogram = field(default_factory=_seconds)
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_generation_tokens: Histogram = field(default_factory=_tokens)

    def note_start(self, stream: Stream, now: float) -> None:
        """An answer's first token is here."""
        self.prompt_tokens += stream.state.metrics.num_prompt_tokens
        self.time_to_first_token.note(now - stream.state.metrics.arrival_time)

    def note_step(self, now: float, before: Mapping[float, int], queue_times: Iterable[float]) -> None:
        """A step's tokens are here; `before` says when, and how many, answers had got their last ones."""
        for last, count in before.items():
            self.inter_token_latency.note(now - last, count)
        for seconds in queue_times:
            self.queue_time.note(seconds)

    def note_end(self, stream: Stream) -> None:
        """A request is over."""
        metrics = stream.state.metrics
        for seq in stream.state.seqs:
            self.finished[seq.status.value] += 1
        self.request_prompt_tokens.note(metrics.num_prompt_tokens)
        self.request_generation_tokens.note(metrics.num_generated_tokens)
        if metrics.latency is not None:
            self.latency.note(metrics.latency)
        if metrics.tpot is not None:
            self.time_per_output_token.note(metrics.tpot)
