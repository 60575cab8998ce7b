"""What the engine reports about itself: a snapshot a step, and the state of its cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class StepStats:
    """One step, for `--show-steps`, plots and benchmarks."""

    index: int
    start: float  # seconds of a monotonic clock
    seconds: float
    waiting: int  # sequences, after the step was scheduled
    running: int
    num_prefill_tokens: int
    num_decode_tokens: int
    preempted: int
    kv_blocks_used: int
    shares: tuple[tuple[str, int, int, int], ...]  # (request_id, index, first token, number of tokens)

    @property
    def num_tokens(self) -> int:
        """T: tokens computed in the step."""
        return self.num_prefill_tokens + self.num_decode_tokens


@dataclass(slots=True, frozen=True)
class EngineStats:
    """The engine now, and its KV cache: what is reserved, and what of it holds a token."""

    waiting: int
    running: int
    steps: int
    preemptions: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_tokens_stored: int
    kv_bytes_total: int
    kv_bytes_reserved: int
    kv_bytes_used: int

    @property
    def kv_waste(self) -> float:
        """Share of the reserved bytes that hold no token."""
        return 1 - self.kv_bytes_used / self.kv_bytes_reserved if self.kv_bytes_reserved else 0.0
