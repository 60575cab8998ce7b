"""An engine in virtual time: real schedulers and caches, a device that does nothing, a clock that a cost model moves.

So a policy has the same score on every machine and every time. The constants are those of one NVIDIA H200 with
Qwen3-0.6B in bfloat16, as docs/performance_log.md measured them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.scheduler import SchedulerLike
from folovllm.request import Request as Asked
from folovllm.request import Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SchedulerOutput

TRACES = Path(__file__).parent / "traces"
V = 30_000  # token ids
STANDSTILL = 3  # steps without a share, though there is work, after which a scheduler is given up


@dataclass(frozen=True, slots=True)
class Costs:
    """What a step takes: seconds = fixed + per_token * tokens + bytes of K/V read / bandwidth."""

    fixed: float = 0.9e-3  # a token of one request alone: 0.893 to 0.896 ms ("The decode step, M6")
    per_token: float = 2.3e-6  # 142,827 prompt tokens took 0.33 s in the same benchmark
    bandwidth: float = 4.26e12  # bytes a second that a plain copy moves
    kv_bytes: int = 114_688  # K and V of a token: 28 layers, 8 heads of 128, 2 bytes a number

    def seconds(self, output: SchedulerOutput, width: int = 0) -> float:
        """Of a step; `width` rows are computed if that is more than its tokens (padding)."""
        cached = sum(scheduled.end for scheduled in output.scheduled_seqs)
        return self.fixed + self.per_token * max(width, output.num_tokens) + cached * self.kv_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    arrival: float
    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Run:
    """What happened, in virtual seconds."""

    requests: list[Request]
    seconds: float = 0.0
    preemptions: int = 0
    first_token: dict[int, float] = field(default_factory=dict)  # request: seconds after its arrival

    @property
    def throughput(self) -> float:
        """Tokens of answers a second."""
        return sum(len(request.answer) for request in self.requests) / self.seconds

    def ttft(self, percentile: float) -> float:
        """Time to first token, in milliseconds."""
        return float(np.percentile(list(self.first_token.values()), percentile)) * 1e3


def tokens(part: str, start: int, end: int) -> list[int]:
    """The tokens of a part of a prompt: its name decides."""
    return [(zlib.crc32(part.encode()) + 7919 * i) % V for i in range(start, end)]


def load_trace(name: str) -> list[Request]:
    """The requests of a trace in the order of their arrival."""
    requests = []
    for arrival, parts, answer in json.loads((TRACES / f"{name}.json").read_text("utf-8")):
        last, count = parts[-1]
        prompt = [token for part, n in parts for token in tokens(part, 0, n)]
        requests.append(Request(arrival, prompt, tokens(last, count, count + answer)))
    return requests


def as_sequence(request: Request) -> Sequence:
    """The sequence of a request: its answer ends when it is complete, and nothing is decoded."""
    params = SamplingParams(max_tokens=len(request.answer), ignore_eos=True, detokenize=False)
    asked = Asked("", request.prompt, params, len(request.answer), 0)
    return Sequence(asked, IncrementalDetokenizer(lambda ids: ""))


def serve(
    scheduler: SchedulerLike,
    requests: list[Request],
    costs: Costs = Costs(),  # it is frozen
    watch: Callable[[SchedulerOutput], int] = lambda output: 0,
) -> Run:
    """Serve all requests; `watch` sees each step, and says how wide it is computed.

    Raises:
        RuntimeError: the scheduler stands still.
    """
    run, clock, idle = Run(requests), 0.0, 0
    ahead = list(enumerate(requests))[::-1]
    served: dict[Sequence, int] = {}
    left = len(requests)
    while left:
        while ahead and ahead[-1][1].arrival <= clock:
            number, request = ahead.pop()
            seq = as_sequence(request)
            served[seq] = number
            scheduler.add(seq)
        if not scheduler.waiting and not scheduler.running:
            clock = ahead[-1][1].arrival
            continue
        output = scheduler.schedule()
        run.preemptions += len(output.preempted)
        idle = 0 if output.scheduled_seqs else idle + 1
        if idle == STANDSTILL:
            raise RuntimeError(f"the scheduler stands still: {left} requests are not served, and no step has a share")
        if not output.scheduled_seqs:
            continue
        clock += costs.seconds(output, watch(output))
        seqs = scheduler.sequences(output)
        drawn = []
        for scheduled, seq in zip(output.scheduled_seqs, seqs, strict=True):
            answer = requests[served[seq]].answer
            drawn.append((seq, [answer[seq.num_output_tokens]] if scheduled.num_samples else []))
            if scheduled.num_samples:
                run.first_token.setdefault(served[seq], clock - requests[served[seq]].arrival)
        scheduler.postprocess(drawn)
        left -= sum(seq.status.is_finished for seq in seqs)
    run.seconds = clock - requests[0].arrival
    return run
