"""The progress bar of `LLM.generate`, with the speeds of prefill and decode."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from tqdm import tqdm

from folovllm.engine.events import Event, StepEnded
from folovllm.engine.llm_engine import LLMEngine


class Progress:
    """A bar of finished requests. While it is shown it listens to the engine's steps."""

    def __init__(self, engine: LLMEngine, total: int) -> None:
        self._engine = engine
        self._bar = tqdm(total=total, desc="Generating", unit="req")
        self._sums = {"prefill": (0, 0.0), "decode": (0, 0.0)}  # tokens, seconds
        self._shown = 0.0

    def __enter__(self) -> Self:
        self._engine.subscribe(self._add_steps)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.unsubscribe(self._add_steps)
        self._bar.close()

    def update(self, finished: int) -> None:
        """Move the bar by so many requests."""
        self._bar.update(finished)

    def _add_steps(self, events: Sequence[Event]) -> None:
        """Add the steps that ended. A step that computes more tokens of a sequence than it samples counts as prefill."""
        for step in (event for event in events if isinstance(event, StepEnded)):
            is_prefill = any(s.num_new_tokens > max(1, s.num_samples) for s in step.output.scheduled_seqs)
            kind = "prefill" if is_prefill else "decode"
            tokens, seconds = self._sums[kind]
            self._sums[kind] = (tokens + step.output.num_tokens, seconds + step.end - step.start)
        if (now := time.monotonic()) - self._shown > 0.1:  # at most ten times a second
            self._shown = now
            self._bar.set_postfix({k: f"{n / s:.0f} tok/s" for k, (n, s) in self._sums.items() if s}, refresh=True)
