"""Structured output in an engine: from the first request with a grammar on, steps go through an executor that masks their samples."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from folovllm.electives.structured_output.manager import StructuredOutputManager
from folovllm.engine.core import EngineCore
from folovllm.engine.events import GivenUp
from folovllm.engine.llm_engine import LLMEngine
from folovllm.engine.scheduler import SchedulerLike
from folovllm.executor.abstract import Executor, Pending
from folovllm.executor.packed_executor import PackedExecutor
from folovllm.request import Sequence, SequenceOutput, SequenceStatus
from folovllm.step.bitmasks import MASKS
from folovllm.step.schedule import SchedulerOutput, StepResult

logger = logging.getLogger("folovllm")
_managers: WeakKeyDictionary[LLMEngine, StructuredOutputManager] = WeakKeyDictionary()


def add_grammar(engine: LLMEngine, seqs: SequenceOf[Sequence]) -> None:
    """Register the grammar of a new request. Raises ValueError if the grammar is not supported."""
    manager = manager_of(engine)
    manager.add(seqs)
    if not isinstance(engine.executor, MaskedExecutor):
        engine.core.executor = MaskedExecutor(engine.executor, engine.scheduler, manager)
        engine.core.end_early = partial(end_broken, engine.core, manager)


def end_broken(core: EngineCore, manager: StructuredOutputManager, seqs: list[Sequence]) -> list[SequenceOutput]:
    """Abort the answers of a step that can no longer satisfy their grammar, and return their ends."""
    broken = manager.broken(seqs)
    for seq in broken:
        logger.warning("request %s ends early: its answer can no longer satisfy its grammar", seq.request_id)
        if core.events.on:
            core.events.emit(GivenUp(seq.seq_id))
    core.scheduler.abort(*broken)
    return [SequenceOutput(seq, [], SequenceStatus.FINISHED_ABORTED) for seq in broken]


def manager_of(engine: LLMEngine) -> StructuredOutputManager:
    """The engine's manager of grammars. The first call makes it."""
    if engine not in _managers:
        _managers[engine] = StructuredOutputManager(engine.tokenizer, engine.setup.vocab_size)
        if engine.extension is not None:
            engine.extension.limit_drafts(_managers[engine])
    return _managers[engine]


def prepare(engine: LLMEngine) -> None:
    """Prepare for structured output. It takes about a second, for which the first such request would hold up all others."""
    manager_of(engine).prepare(engine._processor.eos_token_ids)


@dataclass(slots=True, eq=False)
class MaskedStep:
    """A step that was started, and its sequences in order."""

    executor: MaskedExecutor
    output: SchedulerOutput
    seqs: list[Sequence]
    pending: Pending | None = None  # None: it has its logits, and waits for its bitmasks

    def wait(self) -> StepResult:
        """Wait for the step's tokens and return those that the grammars take. The next step samples if it waits for its bitmasks."""
        assert self.pending is not None
        result = self.pending.wait()
        self.executor.collected(self, result)
        return result


class MaskedExecutor:
    """An executor around another one. A step with grammars gets its logits first: what it may sample depends on all tokens before.

    If these have not arrived, it samples when they do, so the device has work meanwhile. Only a `PackedExecutor` can be a step
    behind; any other one runs a step at once, with its bitmasks.
    """

    def __init__(self, inner: Executor, scheduler: SchedulerLike, manager: StructuredOutputManager) -> None:
        self._inner, self._scheduler, self._manager = inner, scheduler, manager
        self._num_in_flight = 0
        self._unsampled: MaskedStep | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def submit(self, output: SchedulerOutput) -> MaskedStep:
        """Start one step. Raises `NothingScheduled` if it is empty.

        A step with grammars samples once all steps before it are collected. Call `wait` of the steps in their order.
        """
        step = MaskedStep(self, output, self._scheduler.sequences(output))
        if not self._manager.needs_mask(output, step.seqs):
            step.pending = self._inner.submit(output)
        else:
            if isinstance(self._inner, PackedExecutor):
                self._inner.forward(output)
            self._unsampled = step
            if not self._num_in_flight:
                self._sample()
        self._num_in_flight += 1
        return step

    def collected(self, step: MaskedStep, result: StepResult) -> None:
        """Take in the tokens of a step."""
        self._num_in_flight -= 1
        self._manager.accept_tokens(step.seqs, result.token_ids)
        self._sample()

    def _sample(self) -> None:
        if (step := self._unsampled) is not None:
            self._unsampled = None
            bitmasks = self._manager.bitmasks(step.output, step.seqs)
            if isinstance(self._inner, PackedExecutor):
                step.pending = self._inner.sample(bitmasks)
            else:
                masks = bitmasks.by_index([scheduled.row for scheduled in step.output.scheduled_seqs])
                extras = {**(step.output.extras or {}), MASKS: masks}
                step.pending = self._inner.submit(replace(step.output, extras=extras))
