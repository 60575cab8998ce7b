"""`folovllm bench serve`: a load on a server, rate by rate, and what its clients feel."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

from folovllm.bench.http_load import Reply
from folovllm.bench.report import Metric
from folovllm.bench.workload import BenchRequest, Workload

Ask = Callable[[BenchRequest], Awaitable[object]]
UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(slots=True, frozen=True)
class Slo:
    """What a client was promised, in seconds; None: nothing of the kind."""

    ttft: float | None = None
    tpot: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Read "ttft=200ms,tpot=50ms". Raises ValueError for anything else."""
        limits: dict[str, float] = {}
        for item in text.split(","):
            found = re.fullmatch(r"\s*(ttft|tpot)\s*=\s*([0-9.]+)\s*(ms|s)\s*", item)
            if found is None or found[1] in limits:
                raise ValueError(f"--slo takes limits as ttft=200ms,tpot=50ms, not {text!r}")
            limits[found[1]] = float(found[2]) * UNITS[found[3]]
        return cls(**limits)

    def is_met(self, reply: Reply) -> bool:
        """Whether the answer came, and in time."""
        return (
            reply.error is None
            and (self.ttft is None or reply.ttft <= self.ttft)
            and (self.tpot is None or reply.tpot <= self.tpot)
        )

    def __str__(self) -> str:
        named = (("TTFT", self.ttft), ("TPOT", self.tpot))
        return ", ".join(f"{name} {1e3 * limit:g} ms" for name, limit in named if limit is not None)


@dataclass(slots=True, frozen=True)
class Point:
    """One load: requests a second that come whether or not others are answered, or clients that ask one after the other."""

    rate: float | None = None
    clients: int | None = None

    def __str__(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else f"{self.clients} clients"


def arrivals(rate: float, count: int, seed: int = 0) -> list[float]:
    """Seconds at which requests come: a Poisson process, whose gaps are exponential; the first comes at once."""
    rng, now, times = random.Random(seed), 0.0, list[float]()
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def drive(requests: list[BenchRequest], point: Point, ask: Ask) -> None:
    """Ask for all, when the load says so, and wait for all.

    With a rate, a request does not wait for those before it: a server that is too slow sees its queue grow, as it would in
    life. Clients in a closed loop spare it that, each waits for its answer.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        if point.rate is None:
            waiting = iter(requests)

            async def one_after_the_other() -> None:
                for request in waiting:
                    await ask(request)

            for _ in range(point.clients or 1):
                group.create_task(one_after_the_other())
        else:
            start = loop.time()
            for request, time in zip(requests, arrivals(point.rate, len(requests)), strict=True):
                await asyncio.sleep(max(0.0, start + time - loop.time()))
                group.create_task(ask_now(ask, request))


async def ask_now(ask: Ask, request: BenchRequest) -> None:
    """As a task wants it."""
    await ask(request)


@dataclass(slots=True)
class Load:
    """What one point of a sweep showed."""

    point: Point
    replies: list[Reply] = field(default_factory=list)
    begin: float = 0.0
    partial: bool = False

    @property
    def answered(self) -> list[Reply]:
        """Those whose whole answer came."""
        return [reply for reply in self.replies if reply.is_over and reply.error is None and reply.times]

    def metrics(self, slo: Slo) -> dict[str, Metric]:
        """Figures of those that were answered; rates are over the time from the first request to the last token."""
        answered = self.answered
        seconds = max((reply.times[-1] for reply in answered), default=self.begin) - self.begin
        failed = sum(reply.is_over and reply.error is not None for reply in self.replies)
        metrics = {"answered": Metric.of([len(answered)]), "failed": Metric.of([failed], "", False)}
        if not answered or seconds <= 0:
            return metrics
        metrics["requests"] = Metric.of([len(answered) / seconds], "/s")
        tokens = sum(reply.num_tokens for reply in answered)
        metrics["output tokens"] = Metric.of([tokens / seconds], "tok/s")
        metrics["tokens a piece"] = Metric.of([tokens / sum(len(reply.times) for reply in answered)], "", False)
        for name, values in (
            ("TTFT", [reply.ttft for reply in answered]),
            ("TPOT", [reply.tpot for reply in answered if reply.num_tokens > 1]),
            ("ITL", [gap for reply in answered for gap in reply.gaps]),
        ):
            for title, share in (("median", 0.5), ("p99", 0.99)):
                if values:
                    metrics[f"{name} {title}"] = Metric.of([1e3 * quantile(values, share)], "ms", False)
        metrics["goodput"] = Metric.of([sum(map(slo.is_met, answered)) / seconds], "/s")
        return metrics

    @property
    def first_error(self) -> str | None:
        """Why the first one failed that did."""
        return next((reply.error for reply in self.replies if reply.error is not None), None)


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def shifted(workload: Workload, by: int, vocab_size: int) -> list[BenchRequest]:
    """The same requests with other tokens: what they share among themselves they still share, and with no pass before."""
    return [
        replace(request, prompt=[(token + by) % vocab_size for token in request.prompt])
        for request in workload.requests
    ]
