"""What can be seen of an engine, and asked of it, while it serves."""

from __future__ import annotations

import os

from folovllm.cache.manager import KVCacheManager, PrefixCacheStats
from folovllm.engine.metrics import EngineStats, StepLog, StepStats
from folovllm.engine.output_processor import OutputProcessor
from folovllm.engine.parts import Parts
from folovllm.engine.snapshot import engine_stats, snapshot
from folovllm.events import ExpertsAsked, Listener


class Observed:
    """The events of an engine, its figures, and what its cache remembers. Who serves with its parts is a subclass."""

    def __init__(self, parts: Parts) -> None:
        self.setup = parts.setup
        self.num_threads = parts.num_threads
        self.tokenizer = parts.tokenizer
        self.executor = parts.executor
        self.scheduler = parts.scheduler
        self.events = parts.events
        self._faults = parts.faults
        self._output = OutputProcessor(parts.tokenizer, parts.faults)
        self._log: StepLog | None = None
        self._num_steps = 0
        self._num_preemptions = 0
        self._is_closed = False
        self._process = os.getpid()

    def require_open(self) -> None:
        """Raise RuntimeError if the engine was closed, or if this process is a fork of the engine's.

        A fork has neither torch's threads nor its GPUs, so the first product there would wait for ever.
        """
        if self._is_closed:
            raise RuntimeError("the engine was closed: make a new one")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the engine belongs to process {self._process}, and this is a fork of it, which has none of its threads: "
                'start the process with multiprocessing\'s "spawn", and make an engine there'
            )

    def subscribe(self, listener: Listener, experts: bool = False) -> None:
        """Call `listener(events)` after each step with what happened (`folovllm.events`), and now with the present state.

        With `experts`, what happened includes how often experts were asked (`ExpertsAsked`), where `count_experts` is set.
        """
        state = snapshot(self.setup, self.scheduler.kv, self._num_steps, self._output.requests.values())
        experts = experts and self.setup.config.count_experts
        self.events.subscribe(listener, state, experts)
        if experts:
            self.events.emit(ExpertsAsked(self.expert_load()))
            self.events.drain()

    def unsubscribe(self, listener: Listener) -> None:
        """Tell `listener` nothing more. ValueError if it does not listen."""
        self.events.unsubscribe(listener)

    @property
    def history(self) -> list[StepStats] | None:
        """The steps so far, or None. Set it to [] to have each step's figures appended from now on, and to None to stop."""
        return None if self._log is None else self._log.steps

    @history.setter
    def history(self, steps: list[StepStats] | None) -> None:
        if self._log is not None:
            self.unsubscribe(self._log)
        self._log = None
        if steps is not None:
            self._log = StepLog(steps)
            self.subscribe(self._log, experts=True)

    def stats(self) -> EngineStats:
        """Requests and KV cache as they are now."""
        self.require_open()
        return engine_stats(self.setup, self.scheduler, self._num_steps, self._num_preemptions)

    def expert_load(self) -> list[list[int]]:
        """How often each expert of each layer was asked since the start; waits for the steps under way.

        L lists of E numbers; a token asks k experts of a layer. ValueError where that is not counted.
        """
        self.require_open()
        if not self.setup.config.count_experts:
            raise ValueError("experts are not counted: set count_experts=True")
        return self.executor.expert_load()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, as after a change of the weights. Raises ValueError where there is no cache."""
        self._prefix_caching_manager().reset()
        self.events.drain()
        return True  # vLLM's may fail

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Hits and evictions so far. Raises ValueError where there is no cache."""
        return self._prefix_caching_manager().stats

    def _prefix_caching_manager(self) -> KVCacheManager:
        kv = self.scheduler.kv
        if kv is None or not self.setup.config.enable_prefix_caching:
            raise ValueError("there is no prefix cache: set enable_prefix_caching=True, or take milestone m5")
        return kv
