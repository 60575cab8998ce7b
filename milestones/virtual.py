"""An engine in virtual time: real schedulers and caches, a device that does nothing, a clock that a cost model moves.

So a policy has the same score on every machine and every time. The constants are those of one NVIDIA H200 with
Qwen3-0.6B in bfloat16, as docs/performance_log.md measured them.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from folovllm.cache.manager import KVCacheManager
from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.scheduler import SchedulerLike
from folovllm.request import Request as Asked
from folovllm.request import Sequence
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput

TRACES = Path(__file__).parent / "traces"
V = 30_000  # token ids
MAX_TOKENS = 1024  # of every answer, as far as a policy is told: where it ends, only its last token says
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


@dataclass(frozen=True)
class Request:
    """One line of a trace."""

    arrival: float
    prompt: list[int]
    answer: list[int]

    @cached_property
    def prefixes(self) -> npt.NDArray[np.int64]:
        """A number for each token of prompt and answer that stands for it and all before it: for its K and V."""
        return np.array([*itertools.accumulate([0, *self.prompt, *self.answer], lambda h, t: hash((h, t)))][1:])


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
    """The sequence of a request: the last token of its answer ends it, and nothing is decoded."""
    params = SamplingParams(max_tokens=MAX_TOKENS, detokenize=False)
    asked = Asked("", request.prompt, params, MAX_TOKENS, 0, eos_token_ids=frozenset(request.answer[-1:]))
    return Sequence(asked, IncrementalDetokenizer(lambda ids: ""))


class Memory:
    """What each slot of a cache holds, as `Request.prefixes`: a step that reads what nobody wrote there is found out."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._block_size = kv.block_size
        self._cells = np.zeros(kv.num_blocks * kv.block_size, np.int64)

    def step(self, shares: list[tuple[int, int, Sequence, Request]]) -> None:
        """Write the tokens `start` to `end` of each share, then read all up to `end`: the order within a layer.

        Raises:
            ValueError: a block table is too short, or points at K and V of other tokens, or a token is nobody's.
        """
        for start, end, seq, request in shares:
            if end > len(request.prefixes):
                raise ValueError(f"sequence {seq.seq_id} computes {end} tokens and has {len(request.prefixes)} at most")
            self._cells[self._slots(seq, start, end)] = request.prefixes[start:end]
        for _, end, seq, request in shares:
            if (self._cells[self._slots(seq, 0, end)] != request.prefixes[:end]).any():
                raise ValueError(f"sequence {seq.seq_id} reads K and V of tokens that are not its own, or not computed")

    def _slots(self, seq: Sequence, start: int, end: int) -> npt.NDArray[np.int64]:
        table, (block, offset) = np.array(seq.block_table, np.int64), np.divmod(np.arange(start, end), self._block_size)
        is_inside = (table >= 0) & (table * self._block_size < len(self._cells))
        if len(table) * self._block_size < end or not is_inside.all():
            raise ValueError(f"sequence {seq.seq_id} computes token {end - 1}, for which its block table has no block")
        return table[block] * self._block_size + offset


def serve(
    scheduler: SchedulerLike,
    requests: list[Request],
    costs: Costs = Costs(),  # it is frozen
    watch: Callable[[SchedulerOutput], int] = lambda output: 0,
) -> Run:
    """Serve all requests; `watch` sees each step, and says how wide it is computed.

    Raises:
        RuntimeError: the scheduler stands still.
        ValueError: an answer is not complete, or a step could not be computed from what the cache holds.
    """
    run, clock, idle, left = Run(requests), 0.0, 0, len(requests)
    memory = Memory(scheduler.kv) if scheduler.kv else None
    ahead, served = requests[::-1], dict[Sequence, Request]()
    while left:
        while ahead and ahead[-1].arrival <= clock:
            request = ahead.pop()
            served[seq := as_sequence(request)] = request
            scheduler.add(seq)
        if not scheduler.waiting and not scheduler.running:
            if not ahead:
                raise ValueError(f"{left} requests are lost: they neither wait nor run, and are not finished")
            clock = ahead[-1].arrival
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
        shares = list(zip(output.scheduled_seqs, seqs, strict=True))
        if memory:
            memory.step([(scheduled.start, scheduled.end, seq, served[seq]) for scheduled, seq in shares])
        for scheduled, seq in shares:
            if scheduled.num_samples:
                run.first_token.setdefault(seq.seq_id, clock - served[seq].arrival)
        scheduler.postprocess([(seq, _sampled(scheduled, served[seq], seq)) for scheduled, seq in shares])
        left -= sum(_is_served(seq, served[seq]) for seq in seqs)
    run.seconds = clock - requests[0].arrival
    return run


def _sampled(scheduled: ScheduledSequence, request: Request, seq: Sequence) -> list[int]:
    """The answer's next token (its last once more where a sequence goes on), or nothing if no token is sampled."""
    token = request.answer[min(seq.num_output_tokens, len(request.answer) - 1)]
    return [token] if scheduled.num_samples else []


def _is_served(seq: Sequence, request: Request) -> bool:
    """Whether the sequence is finished. ValueError where its answer is then not the request's."""
    if seq.status.is_finished and seq.output_token_ids.tolist() != request.answer:
        ended = f"an answer ended after {seq.num_output_tokens} of its {len(request.answer)} tokens"
        raise ValueError(f"{ended}, or has others")
    return seq.status.is_finished
