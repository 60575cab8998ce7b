"""What a server counts, in plain Python, and how `GET /metrics` shows it to Prometheus: under vLLM's names where the meaning is the same."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from folovllm.electives.server.messages import SchedulerStats
from folovllm.engine.metrics import imbalance
from folovllm.engine.output_processor import RequestState

REASONS = ("stop", "length", "abort")
LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)
HISTOGRAMS = {  # what each is of
    "time_to_first_token_seconds": "From arrival to the first token.",
    "request_queue_time_seconds": "From the queue to the first step.",
    "inter_token_latency_seconds": "Between tokens.",
    "request_time_per_output_token_seconds": "Mean of a request.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Generated tokens of a request.",
}


class Histogram:
    """How many values were at most each of some bounds. To record one costs a search among them."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def record(self, value: float | None, times: int = 1) -> None:
        """Count a value, if it is known."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += times
            self.sum += value * times


class Counters:
    """What was counted since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.finished = Counter[str]()  # answers, by finish_reason
        self.histograms = {name: Histogram(SECONDS if "seconds" in name else TOKENS) for name in HISTOGRAMS}

    def record_start(self, request: RequestState, now: float) -> None:
        """An answer's first token is here."""
        self.prompt_tokens += request.metrics.num_prompt_tokens
        self.histograms["time_to_first_token_seconds"].record(now - request.metrics.arrival_time)

    def record_step(self, now: float, before: Mapping[float, int], queue_times: Iterable[float]) -> None:
        """A step's tokens are here; `before` says when, and how many, answers had got their last ones."""
        for last, count in before.items():
            self.histograms["inter_token_latency_seconds"].record(now - last, count)
        for seconds in queue_times:
            self.histograms["request_queue_time_seconds"].record(seconds)

    def record_end(self, request: RequestState) -> None:
        """A request is over."""
        metrics = request.metrics
        self.finished.update(seq.status.value for seq in request.seqs)
        self.histograms["request_prompt_tokens"].record(metrics.num_prompt_tokens)
        self.histograms["request_generation_tokens"].record(metrics.num_generated_tokens)
        self.histograms["e2e_request_latency_seconds"].record(metrics.latency)
        self.histograms["request_time_per_output_token_seconds"].record(metrics.tpot)


def metrics_page(
    model: str, stats: SchedulerStats, counters: Counters, expert_load: list[list[int]], speculates: bool
) -> bytes:
    """The figures in Prometheus's format. `model` is a label of each.

    Args:
        expert_load: tokens that were routed to each expert of each layer, [L][E]; empty if they are not counted.
        speculates: whether the engine verifies draft tokens.
    """
    families, gauge, counter = list[Metric](), GaugeMetricFamily, CounterMetricFamily

    def add(kind: type[Any], name: str, text: str, value: float | Mapping[Any, float], *labels: str) -> None:
        """A family with one value, or with one for each value of these labels."""
        family = kind(name, text, labels=(*LABELS, *labels))
        for more, number in (value if isinstance(value, Mapping) else {(): value}).items():
            family.add_metric((model, "0", *more), number)
        families.append(family)

    used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    add(gauge, "vllm:num_requests_running", "Sequences in the batch.", stats.num_running)
    add(gauge, "vllm:num_requests_waiting", "Sequences that wait.", stats.num_waiting)
    add(gauge, "vllm:kv_cache_usage_perc", "Used share of the KV cache, 1 is all.", used)
    add(counter, "vllm:num_preemptions", "Preempted sequences.", stats.num_preemptions)
    add(counter, "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_tokens)
    add(counter, "vllm:prefix_cache_hits", "Tokens found there.", stats.prefix_tokens_hit)
    if speculates:
        add(counter, "vllm:spec_decode_num_drafts", "Verified drafts.", stats.num_drafts)
        add(counter, "vllm:spec_decode_num_draft_tokens", "Draft tokens.", stats.num_draft_tokens)
        add(counter, "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.num_accepted)
    add(counter, "vllm:prompt_tokens", "Tokens of prompts.", counters.prompt_tokens)
    add(counter, "vllm:generation_tokens", "Generated tokens.", counters.generation_tokens)
    if expert_load:  # vLLM has no such metrics, nor those of K/V that move
        each = {(str(i), str(j)): n for i, counts in enumerate(expert_load) for j, n in enumerate(counts)}
        uneven = {(str(i),): imbalance(counts) for i, counts in enumerate(expert_load)}
        routed, text = "Tokens that were routed to an expert.", "A layer's busiest expert, 1 is its share."
        add(counter, "folovllm:expert_tokens", routed, each, "layer", "expert")
        add(gauge, "folovllm:expert_imbalance", text, uneven, "layer")
    if stats.moved:
        moved = {tuple(name.split("_")): count for name, count in stats.moved.items()}
        text = "Blocks of K/V that left the device, came back, or were lost."
        add(counter, "folovllm:kv_blocks_moved", text, moved, "what", "place")
    ends = {(reason,): counters.finished[reason] for reason in REASONS}
    add(counter, "vllm:request_success", "Answers that ended.", ends, "finished_reason")
    for name, histogram in counters.histograms.items():
        family = HistogramMetricFamily(f"vllm:{name}", HISTOGRAMS[name], labels=LABELS)
        # Prometheus counts what is at most a bound, so buckets add up
        buckets = zip([*map(str, histogram.bounds), "+Inf"], accumulate(histogram.counts), strict=True)
        family.add_metric((model, "0"), list(buckets), histogram.sum)
        families.append(family)
    return generate_latest(SimpleNamespace(collect=lambda: families))
