"""What a server counts, in plain Python, and how `GET /metrics` shows it to Prometheus: under vLLM's names where the meaning is the same."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

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

    def record(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Counters:
    """What was counted since the start."""

    def __init__(self) -> None:
        self.prompt_tokens = self.generation_tokens = 0
        self.finished = Counter[str]()  # answers, by finish_reason
        self.histograms = {name: Histogram(SECONDS if "seconds" in name else TOKENS) for name in HISTOGRAMS}

    def record(self, name: str, value: float | None, times: int = 1) -> None:
        """Count a value in a histogram, if it is known."""
        if value is not None:
            self.histograms[name].record(value, times)

    def record_start(self, request: RequestState, now: float) -> None:
        """An answer's first token is here."""
        self.prompt_tokens += request.metrics.num_prompt_tokens
        self.record("time_to_first_token_seconds", now - request.metrics.arrival_time)

    def record_step(self, now: float, before: Mapping[float, int], queue_times: Iterable[float]) -> None:
        """A step's tokens are here; `before` says when, and how many, answers had got their last ones."""
        for last, count in before.items():
            self.record("inter_token_latency_seconds", now - last, count)
        for seconds in queue_times:
            self.record("request_queue_time_seconds", seconds)

    def record_end(self, request: RequestState) -> None:
        """A request is over."""
        metrics = request.metrics
        self.finished.update(seq.status.value for seq in request.seqs)
        self.record("request_prompt_tokens", metrics.num_prompt_tokens)
        self.record("request_generation_tokens", metrics.num_generated_tokens)
        self.record("e2e_request_latency_seconds", metrics.latency)
        self.record("request_time_per_output_token_seconds", metrics.tpot)


@dataclass(eq=False)
class Metrics(Collector):
    """A page of figures. `model` is a label of each.

    Attributes:
        expert_load: tokens that were routed to each expert of each layer, [L][E]; empty if they are not counted.
        speculates: whether the engine verifies draft tokens.
    """

    model: str
    stats: SchedulerStats
    counters: Counters
    expert_load: list[list[int]]
    speculates: bool

    def text(self) -> bytes:
        """The page in Prometheus's format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """The families of metrics, in the order of the page."""
        stats, counters, gauge, counter = self.stats, self.counters, GaugeMetricFamily, CounterMetricFamily
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        drafts = (
            ("spec_decode_num_drafts", counter, "Verified drafts.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", counter, "Draft tokens.", stats.num_draft_tokens),
            ("spec_decode_num_accepted_tokens", counter, "Accepted draft tokens.", stats.num_accepted),
        )
        for name, kind, text, value in (
            ("num_requests_running", gauge, "Sequences in the batch.", stats.num_running),
            ("num_requests_waiting", gauge, "Sequences that wait.", stats.num_waiting),
            ("kv_cache_usage_perc", gauge, "Used share of the KV cache, 1 is all.", used),
            ("num_preemptions", counter, "Preempted sequences.", stats.num_preemptions),
            ("prefix_cache_queries", counter, "Tokens looked up in the prefix cache.", stats.prefix_tokens),
            ("prefix_cache_hits", counter, "Tokens found there.", stats.prefix_tokens_hit),
            *(drafts if self.speculates else ()),
            ("prompt_tokens", counter, "Tokens of prompts.", counters.prompt_tokens),
            ("generation_tokens", counter, "Generated tokens.", counters.generation_tokens),
        ):
            yield self._family(kind, f"vllm:{name}", text, [((), value)])
        if load := self.expert_load:  # vLLM has no such metrics
            each = [((str(i), str(j)), n) for i, counts in enumerate(load) for j, n in enumerate(counts)]
            uneven = [((str(i),), imbalance(counts)) for i, counts in enumerate(load)]
            routed, text = "Tokens that were routed to an expert.", "A layer's busiest expert, 1 is its share."
            yield self._family(counter, "folovllm:expert_tokens", routed, each, "layer", "expert")
            yield self._family(gauge, "folovllm:expert_imbalance", text, uneven, "layer")
        if moved := stats.moved:  # neither has it such metrics of K/V that move
            by_name = [((*name.split("_"),), count) for name, count in moved.items()]
            text = "Blocks of K/V that left the device, came back, or were lost."
            yield self._family(counter, "folovllm:kv_blocks_moved", text, by_name, "what", "place")
        ends = [((reason,), counters.finished[reason]) for reason in REASONS]
        yield self._family(counter, "vllm:request_success", "Answers that ended.", ends, "finished_reason")
        for name, histogram in counters.histograms.items():
            family = HistogramMetricFamily(f"vllm:{name}", HISTOGRAMS[name], labels=LABELS)
            # Prometheus counts what is at most a bound, so buckets add up
            buckets = zip([*map(str, histogram.bounds), "+Inf"], accumulate(histogram.counts), strict=True)
            family.add_metric((self.model, "0"), list(buckets), histogram.sum)
            yield family

    def _family(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        values: Iterable[tuple[tuple[str, ...], float]],
        *labels: str,
    ) -> Metric:
        """A family whose values have `labels` beside those of all."""
        family = kind(name, text, labels=(*LABELS, *labels))
        for more, value in values:
            family.add_metric((self.model, "0", *more), value)
        return family
