"""What an engine can do beside serving requests: answer a list at once, and tell of its events, steps, cache and experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, overload

from folovllm.cache.cached_prefix import PrefixCacheStats
from folovllm.cache.manager import KVCacheManager
from folovllm.engine.core import EngineCore
from folovllm.engine.events import ExpertsAsked, Listener, RequestAdded, SequenceState, Snapshot
from folovllm.engine.input_processor import InputProcessor
from folovllm.engine.inputs import Prompt, as_requests, is_one_prompt
from folovllm.engine.metrics import EngineStats, StepLog, StepStats, engine_stats
from folovllm.engine.output_processor import RequestState
from folovllm.engine.require import takes_vllm_arguments
from folovllm.engine.setup import EngineSetup
from folovllm.models.files import full_tokenizer
from folovllm.outputs import RequestOutput
from folovllm.plugins import CALLS, load_elective
from folovllm.request import Request, Sequence, SequenceStatus
from folovllm.sampling_params import RequestOutputKind, SamplingParams


class EngineCalls:
    """The part of an `LLMEngine` that serving needs nothing of."""

    setup: EngineSetup
    core: EngineCore
    tokenizer: Any
    _processor: InputProcessor
    _log: StepLog | None = None
    one_call: Callable[[], AbstractContextManager[None]]
    require_open: Callable[[], None]
    add_request: Callable[..., None]
    _require_new: Callable[[str], None]
    _add: Callable[[list[Sequence], RequestOutputKind], None]
    step: Callable[[], list[RequestOutput]]

    def __getattr__(self, name: str) -> Any:
        """A call that an elective owns: a function of the engine in `folovllm.plugins.CALLS`, such as `expert_load`."""
        if name not in CALLS:
            raise AttributeError(f"an engine has no {name!r}")
        return partial(load_elective(CALLS[name], name), self)

    @takes_vllm_arguments("generate")
    def generate(
        self,
        prompts: Prompt | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one prompt (one output) or a list of them (a list). `LLM.generate` can do more."""
        requests = as_requests(prompts, SamplingParams() if sampling_params is None else sampling_params)
        ids = [f"generate-{index}" for index in range(len(requests))]
        finished: dict[str, RequestOutput] = {}
        with self.one_call():
            try:
                for request_id, request in zip(ids, requests, strict=True):
                    self.add_request(request_id, request.prompt, request.params, stream=False)
                while len(finished) < len(ids):
                    finished |= {output.request_id: output for output in self.step()}
            finally:
                self.core.end(ids)  # where an error left some
        outputs = [finished[request_id] for request_id in ids]
        return outputs[0] if is_one_prompt(prompts) else outputs

    def add_checked(self, request: Request) -> None:
        """Queue a request that an `InputProcessor` of this model has checked, in another process say; it has one output, its last.

        Raises what `add_request` raises.
        """
        self._require_new(request.request_id)
        self._add(self._processor.sequences(request), RequestOutputKind.FINAL_ONLY)

    @overload
    def abort_request(self, request_id: str) -> RequestOutput: ...  # type: ignore[overload-overlap]
    @overload
    def abort_request(self, request_id: Iterable[str]) -> list[RequestOutput]: ...
    def abort_request(self, request_id: str | Iterable[str]) -> RequestOutput | list[RequestOutput]:
        """End a request at once and return what it has so far, with finish_reason "abort".

        Of several ids, those that are not being served are skipped. A single one that is not raises ValueError.
        """
        if isinstance(request_id, str):
            if request_id not in self.core.output_processor.requests:
                raise ValueError(f"there is no request {request_id!r} to abort: it has finished, or never was")
            return self.core.output_processor.report(self.core.end([request_id])[0])
        return [self.core.output_processor.report(state) for state in self.core.end(list(request_id))]

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, which is transformers'."""
        return full_tokenizer(self.tokenizer)

    @property
    def request_ids(self) -> list[str]:
        """The ids of the requests that are being served."""
        return list(self.core.output_processor.requests)

    def get_num_unfinished_requests(self) -> int:
        """How many requests are being served."""
        return len(self.core.output_processor.requests)

    def subscribe(self, listener: Listener, experts: bool = False) -> None:
        """Call `listener(events)` after each step with what happened (`folovllm.engine.events`), and now with the present state.

        With `experts`, what happened includes how often experts were asked (`ExpertsAsked`), where `count_experts` is set.
        """
        core = self.core
        state = snapshot(self.setup, core.scheduler.kv, core.num_steps, core.output_processor.requests.values())
        core.events.subscribe(listener, state)
        if experts and self.setup.config.extras.get("count_experts"):
            core.events.sources[listener] = lambda: ExpertsAsked(self.expert_load())
            core.events.emit(core.events.sources[listener]())
            core.events.drain()

    def unsubscribe(self, listener: Listener) -> None:
        """Tell `listener` nothing more. ValueError if it does not listen."""
        self.core.events.unsubscribe(listener)

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
        return engine_stats(self.setup, self.core.scheduler, self.core.num_steps, self.core.num_preemptions)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Raises ValueError where there is no cache, RuntimeError beside another call."""
        with self.one_call():
            self.forget_prefixes()
        return True  # vLLM's may fail

    def forget_prefixes(self) -> None:
        """Forget all cached prefixes, as within a call that changes the weights. Raises ValueError where there is no cache."""
        self._prefix_caching_manager().reset()
        self.core.events.drain()

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Hits and evictions so far. Raises ValueError where there is no cache."""
        return self._prefix_caching_manager().stats

    def _prefix_caching_manager(self) -> KVCacheManager:
        kv = self.core.scheduler.kv
        if kv is None or not self.setup.config.enable_prefix_caching:
            raise ValueError("there is no prefix cache: set enable_prefix_caching=True, or take milestone m5")
        return kv


def snapshot(
    setup: EngineSetup, kv: KVCacheManager | None, num_steps: int, requests: Iterable[RequestState]
) -> Snapshot:
    """The state that later events change. `kv` is None where the cache is no pool of blocks."""
    return Snapshot(
        num_blocks=0 if kv is None else kv.num_blocks,
        block_size=setup.block_size,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        num_steps=num_steps,
        blocks=() if kv is None else tuple(kv.block_states()),
        sequences=tuple(
            SequenceState(
                added=request_added(seq, request.metrics.arrival_time),
                is_running=seq.status is SequenceStatus.RUNNING,
                num_tokens=seq.num_tokens,
                num_computed_tokens=seq.num_computed_tokens,
                block_table=tuple(seq.block_table),
                token_ids=seq.token_ids.tolist(),
            )
            for request in requests
            for seq in request.seqs
            if not seq.status.is_finished
        ),
    )


def request_added(seq: Sequence, time: float) -> RequestAdded:
    """The arrival of a sequence."""
    asked = seq.request
    return RequestAdded(
        seq.seq_id, asked.request_id, seq.index, asked.prompt_token_ids, asked.max_tokens, asked.priority, time
    )
