"""The engine: requests go in, each step computes some of their tokens, and what is new comes out."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable
from functools import partial

from folovllm.cache import kv_cache_manager
from folovllm.cache.prefix_cache import PrefixCacheStats, PrefixCachingBlockManager
from folovllm.config import EngineConfig
from folovllm.engine.cpu_threads import use_threads
from folovllm.engine.input_processor import InputProcessor, Prompt
from folovllm.engine.metrics import EngineStats, StepStats
from folovllm.engine.output_processor import RequestState
from folovllm.engine.overlap_scheduler import OverlapScheduler
from folovllm.engine.scheduler import (
    Scheduler,
    SchedulerLike,
    SchedulerOutput,
    SerialScheduler,
    chunk,
    preempt,
    wait,
    whole_prompt,
)
from folovllm.engine.setup import EngineSetup, set_up
from folovllm.executor.abstract import Executor
from folovllm.executor.gpu_executor import GPUExecutor
from folovllm.models.files import load_tokenizer
from folovllm.outputs import RequestOutput, TokenLogprob
from folovllm.request import Sequence
from folovllm.sample.sampler import SamplerOutput
from folovllm.sampling_params import SamplingParams


class LLMEngine:
    """Serves requests step by step; `LLM` wraps it for offline use.

    Not for several threads. After an exception inside `step` the engine's state is undefined: make a new one.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.setup = set_up(config)
        self.num_threads = use_threads(self.setup)
        self.tokenizer = load_tokenizer(self.setup.path, config)
        self._processor = InputProcessor(self.setup, self.tokenizer)
        self.executor = make_executor(self.setup)
        self.scheduler = make_scheduler(self.setup, self.executor.num_kv_blocks)
        self._requests: dict[str, RequestState] = {}
        self.last_stats: StepStats | None = None
        self.history: list[StepStats] | None = None  # set it to [] to keep every step's snapshot
        self._num_steps = 0
        self._num_preemptions = 0
        self._is_closed = False
        self._process = os.getpid()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        stream: bool = True,
    ) -> None:
        """Queue a request; it takes part from the next step on.

        Args:
            priority: smaller is served first, with `scheduling="priority"`.
            cache_salt: prefixes in the cache are shared only between requests of equal salts.
            stream: report each token as it comes; False reports the finished request alone.

        Raises:
            ValueError: the id is in use, or the request can never be served. Nothing else is disturbed.
            RuntimeError: the engine was closed.
        """
        self.require_open()
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use: choose another, or wait until it has finished")
        params = SamplingParams() if params is None else params
        seqs = self._processor.process(request_id, prompt, params, priority, cache_salt)
        text = prompt if isinstance(prompt, str) else None
        self._requests[request_id] = RequestState(request_id, text, seqs, stream, time.monotonic())
        for seq in seqs:
            self.scheduler.add(seq)

    def abort_request(self, request_id: str) -> RequestOutput:
        """End a request at once and return what it has so far, with finish_reason "abort".

        Raises:
            ValueError: no such request is being served.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            raise ValueError(f"there is no request {request_id!r} to abort: it has finished, or never was")
        for seq in state.seqs:
            if not seq.status.is_finished:
                self.scheduler.abort(seq)
        state.note_progress(time.monotonic())
        return state.output()

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this id is being served."""
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, draw, and hand out what is new. Without work it returns an empty list."""
        self.require_open()
        if not self.has_unfinished_requests():
            return []
        start = time.monotonic()
        output = self.scheduler.schedule()
        return self._take_in(output, self.executor.execute_model(output), start)

    def _take_in(self, output: SchedulerOutput, result: SamplerOutput, start: float) -> list[RequestOutput]:
        """Hand the tokens of a step that began at `start` to their sequences; returns what is new."""
        updated = self.scheduler.postprocess(output, result.token_ids)
        self._keep_logprobs(output, result, updated)
        now = time.monotonic()
        self._record(output, start, now)
        return self._outputs(updated, now)

    def require_open(self) -> None:
        """Raise RuntimeError if the engine was closed, so that there is no model any more, or if this is a fork.

        torch's threads and GPUs stay behind in the process that used them: in a fork the first product waits for ever.
        """
        if self._is_closed:
            raise RuntimeError("the engine was closed: make a new one")
        if os.getpid() != self._process:
            raise RuntimeError(
                f"the engine belongs to process {self._process}, and this is a fork of it, which has none of its threads: "
                'start the process with multiprocessing\'s "spawn", and make an engine there'
            )

    def close(self) -> None:
        """End what is being served and give the model's memory back; twice is once."""
        self._is_closed = True
        for request_id in list(self._requests):
            self.abort_request(request_id)
        self.executor.shutdown()
        gc.unfreeze()  # `make_engine` froze what refers to itself; only thawed can it be collected
        gc.collect()

    def stats(self) -> EngineStats:
        """Requests and KV cache as they are now."""
        self.require_open()
        num_blocks, num_used = self.executor.num_kv_blocks, self._num_used_blocks()
        bytes_per_token = self.setup.kv_bytes_per_token
        bytes_per_block = self.setup.block_size * bytes_per_token
        running = self.scheduler.running
        num_shared = sum(len(seq.block_table) for seq in running) - num_used  # pages are full before they are shared
        stored = sum(seq.num_computed_tokens for seq in running) - num_shared * self.setup.block_size
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            running=len(running),
            steps=self._num_steps,
            preemptions=self._num_preemptions,
            kv_blocks_total=num_blocks,
            kv_blocks_used=num_used,
            kv_tokens_stored=stored,
            kv_bytes_total=num_blocks * bytes_per_block,
            kv_bytes_reserved=num_used * bytes_per_block,
            kv_bytes_used=stored * bytes_per_token,
        )

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, as after a change of the weights. Raises ValueError where there is no cache."""
        self._prefix_caching_manager().prefix_cache.reset()

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Hits and evictions so far. Raises ValueError where there is no cache."""
        return self._prefix_caching_manager().prefix_cache.stats

    def _prefix_caching_manager(self) -> PrefixCachingBlockManager:
        kv = self.scheduler.kv if isinstance(self.scheduler, Scheduler) else None
        if not isinstance(kv, PrefixCachingBlockManager):
            raise ValueError("there is no prefix cache: set enable_prefix_caching=True, or take milestone m5")
        return kv

    def _outputs(self, updated: Iterable[Sequence], now: float) -> list[RequestOutput]:
        """One output for each request that has something to report."""
        outputs = []
        for request_id in dict.fromkeys(seq.request_id for seq in updated):
            state = self._requests[request_id]
            finished = state.finished
            if finished or state.stream or state.metrics.first_token_time is None:
                state.note_progress(now)
            if finished:
                del self._requests[request_id]
            if finished or state.stream:
                outputs.append(state.output())
        return outputs

    def _keep_logprobs(self, output: SchedulerOutput, result: SamplerOutput, updated: list[Sequence]) -> None:
        """Add text to the log-probabilities that requests asked for."""
        if not any(result.logprobs):
            return
        alive = set(map(id, updated))
        for item, logprobs in zip(output.scheduled, result.logprobs, strict=True):
            if logprobs is not None and id(item.seq) in alive:
                row = [TokenLogprob(id_, value, self.tokenizer.decode([id_])) for id_, value in logprobs]
                item.seq.logprobs.append(row)

    def _num_used_blocks(self) -> int:
        scheduler = self.scheduler
        return scheduler.kv.num_blocks - scheduler.kv.num_free if isinstance(scheduler, Scheduler) else 0

    def _record(self, output: SchedulerOutput, start: float, now: float) -> None:
        """Note what the step did."""
        self._num_preemptions += len(output.preempted)
        decodes = sum(1 for item in output.scheduled if item.num_new_tokens == 1 and item.seq.num_output_tokens > 1)
        shares = (
            ()
            if self.history is None
            else tuple((i.seq.request_id, i.seq.index, i.start, i.num_new_tokens) for i in output.scheduled)
        )
        self.last_stats = StepStats(
            index=self._num_steps,
            start=start,
            seconds=now - start,
            waiting=len(self.scheduler.waiting),
            running=len(output.scheduled),
            num_prefill_tokens=output.num_tokens - decodes,
            num_decode_tokens=decodes,
            preempted=len(output.preempted),
            kv_blocks_used=self._num_used_blocks(),
            shares=shares,
        )
        self._num_steps += 1
        if self.history is not None:
            self.history.append(self.last_stats)


def make_executor(setup: EngineSetup) -> Executor:
    """A device in this process, or several: in processes of their own, or in those that torchrun has started."""
    if setup.config.tensor_parallel_size == 1:
        return GPUExecutor(setup)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from folovllm.executor.torchrun_executor import TorchrunExecutor

        return TorchrunExecutor(setup)
    from folovllm.executor.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(setup)


def make_scheduler(setup: EngineSetup, num_kv_blocks: int) -> SchedulerLike:
    """The scheduler that the configuration asks for, with its two steps chosen."""
    config = setup.config
    if config.kv_cache == "growing":
        return SerialScheduler()
    scheduler_class: Callable[..., Scheduler] = OverlapScheduler if config.packed_steps else Scheduler
    tokens_of_step = partial(chunk, threshold=config.long_prefill_token_threshold)
    return scheduler_class(
        kv=kv_cache_manager(str(config.kv_cache), bool(config.enable_prefix_caching))(num_kv_blocks, setup.block_size),
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        tokens_of_step=tokens_of_step if config.enable_chunked_prefill else whole_prompt,
        make_room=wait if config.kv_cache == "slots" else preempt,
        by_priority=config.scheduling == "priority",
    )
