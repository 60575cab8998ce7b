"""What a server counts, in plain Python, and how `GET /metrics` shows it to Prometheus: under vLLM's names where the meaning is the same."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from folovllm.engine.metrics import imbalance

if TYPE_CHECKING:
    from folovllm.server.async_engine import AsyncEngine
    from folovllm.server.stream import Stream

REASONS = ("stop", "length", "abort")
LABELS = ("model_name", "engine")


SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)


class Histogram:
    """How many values were at most each of some bounds. To record one costs a search among them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def record(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass(slots=True)
class Counters:
    """What was counted since the start."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # answers, by finish_reason
    time_to_first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    inter_token_latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    time_per_output_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    request_prompt_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    request_generation_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))

    def record_start(self, stream: Stream, now: float) -> None:
        """An answer's first token is here."""
        self.prompt_tokens += stream.metrics.num_prompt_tokens
        self.time_to_first_token.record(now - stream.metrics.arrival_time)

    def record_step(self, now: float, before: Mapping[float, int], queue_times: Iterable[float]) -> None:
        """A step's tokens are here; `before` says when, and how many, answers had got their last ones."""
        for last, count in before.items():
            self.inter_token_latency.record(now - last, count)
        for seconds in queue_times:
            self.queue_time.record(seconds)

    def record_end(self, stream: Stream) -> None:
        """A request is over."""
        metrics = stream.metrics
        for seq in stream.seqs:
            self.finished[seq.status.value] += 1
        self.request_prompt_tokens.record(metrics.num_prompt_tokens)
        self.request_generation_tokens.record(metrics.num_generated_tokens)
        if metrics.latency is not None:
            self.latency.record(metrics.latency)
        if metrics.tpot is not None:
            self.time_per_output_token.record(metrics.tpot)


class Metrics(Collector):
    """Reads the engine's counters when it is asked, and costs nothing otherwise."""

    def __init__(self, engine: AsyncEngine, model: str) -> None:
        self._engine = engine
        self._labels = (model, "0")
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """As `prometheus_client` has it."""
        load, counters = self._engine.stats, self._engine.counters
        used = load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0
        yield self._number(GaugeMetricFamily, "num_requests_running", "Sequences in the batch.", load.num_running)
        yield self._number(GaugeMetricFamily, "num_requests_waiting", "Sequences that wait.", load.num_waiting)
        yield self._number(GaugeMetricFamily, "kv_cache_usage_perc", "Used share of the KV cache, 1 is all.", used)
        counts = [
            ("num_preemptions", "Preempted sequences.", load.num_preemptions),
            ("prefix_cache_queries", "Tokens asked of the prefix cache.", load.prefix_tokens),
            ("prefix_cache_hits", "Tokens found there.", load.prefix_tokens_hit),
        ]
        if self._engine.config.speculative_config is not None:
            counts += [
                ("spec_decode_num_drafts", "Checks of guessed tokens.", load.num_drafts),
                ("spec_decode_num_draft_tokens", "Guessed tokens.", load.num_draft_tokens),
                ("spec_decode_num_accepted_tokens", "Right guesses.", load.num_accepted),
            ]
        counts += [
            ("prompt_tokens", "Tokens of prompts.", counters.prompt_tokens),
            ("generation_tokens", "Generated tokens.", counters.generation_tokens),
        ]
        for name, text, count in counts:
            yield self._number(CounterMetricFamily, name, text, count)
        if self._engine.expert_load:
            yield from self._experts(self._engine.expert_load)
        finished = CounterMetricFamily(
            "vllm:request_success", "Answers that ended.", labels=(*LABELS, "finished_reason")
        )
        for reason in REASONS:
            finished.add_metric((*self._labels, reason), counters.finished[reason])
        yield finished
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", counters.time_to_first_token),
            ("request_queue_time_seconds", "From the queue to the first step.", counters.queue_time),
            ("inter_token_latency_seconds", "Between tokens.", counters.inter_token_latency),
            ("request_time_per_output_token_seconds", "Mean of a request.", counters.time_per_output_token),
            ("e2e_request_latency_seconds", "From arrival to the last token.", counters.latency),
            ("request_prompt_tokens", "Tokens of a prompt.", counters.request_prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a request.", counters.request_generation_tokens),
        ):
            yield self._histogram(name, text, histogram)

    def _number(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _experts(self, load: list[list[int]]) -> Iterator[Metric]:
        """vLLM has no such metrics: these are ours."""
        asked = CounterMetricFamily(
            "folovllm:expert_tokens", "Tokens that asked an expert.", labels=(*LABELS, "layer", "expert")
        )
        uneven = GaugeMetricFamily(
            "folovllm:expert_imbalance", "A layer's busiest expert, 1 is its share.", labels=(*LABELS, "layer")
        )
        for layer, counts in enumerate(load):
            uneven.add_metric((*self._labels, str(layer)), imbalance(counts))
            for expert, count in enumerate(counts):
                asked.add_metric((*self._labels, str(layer), str(expert)), count)
        yield from (asked, uneven)

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Prometheus counts what is at most a bound, so buckets add up."""
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
        total, buckets = 0, []
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else str(bound), float(total)))
        family.add_metric(self._labels, buckets, histogram.sum)
        return family
