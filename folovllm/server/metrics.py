"""`GET /metrics`: what the server counts, for Prometheus, under vLLM's names where the meaning is the same."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from folovllm.engine.metrics import imbalance
from folovllm.server.async_engine import AsyncEngine
from folovllm.server.counters import Histogram

REASONS = ("stop", "length", "abort")
LABELS = ("model_name", "engine")


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
        load, counters = self._engine.load, self._engine.counters
        yield self._gauge("num_requests_running", "Sequences in the batch.", load.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", load.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Used share of the KV cache, 1 is all.", self._kv_usage())
        yield self._counter("num_preemptions", "Preempted sequences.", load.num_preemptions)
        yield self._counter("prefix_cache_queries", "Tokens asked of the prefix cache.", load.prefix_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found there.", load.prefix_tokens_hit)
        if self._engine.config.speculation is not None:
            yield self._counter("spec_decode_num_drafts", "Checks of guessed tokens.", load.num_drafts)
            yield self._counter("spec_decode_num_draft_tokens", "Guessed tokens.", load.num_guessed)
            yield self._counter("spec_decode_num_accepted_tokens", "Right guesses.", load.num_accepted)
        if self._engine.expert_load:
            yield from self._experts(self._engine.expert_load)
        yield self._counter("prompt_tokens", "Tokens of prompts.", counters.prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens.", counters.generation_tokens)
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

    def _kv_usage(self) -> float:
        load = self._engine.load
        return load.kv_blocks_used / load.kv_blocks_total if load.kv_blocks_total else 0.0

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        """Prometheus counts what is at most a bound, so buckets add up."""
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
        total, buckets = 0, []
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == math.inf else str(bound), float(total)))
        family.add_metric(self._labels, buckets, histogram.sum)
        return family
