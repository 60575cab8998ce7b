"""The engine: requests go in, each step computes some of their tokens, and what is new comes out."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from folovllm import build
from folovllm.config import EngineConfig
from folovllm.engine.calls import EngineCalls, request_added
from folovllm.engine.cpu_threads import use_threads
from folovllm.engine.input_processor import InputProcessor
from folovllm.engine.inputs import Prompt
from folovllm.engine.output_processor import RequestState
from folovllm.engine.require import takes_vllm_arguments
from folovllm.engine.setup import set_up
from folovllm.executor.abstract import Executor
from folovllm.learn import builders
from folovllm.models.files import load_tokenizer
from folovllm.outputs import RequestOutput
from folovllm.plugins import STRUCTURED_OUTPUT, load_elective
from folovllm.request import Sequence
from folovllm.sampling_params import RequestOutputKind, SamplingParams


class LLMEngine(EngineCalls):
    """Serves requests step by step; `LLM` wraps it for offline use.

    Use it from one thread at a time. After an exception inside `step` the engine's state is undefined: make a new one.
    """

    def __init__(self, config: Any, **overrides: Any) -> None:
        """Raises ValueError if `config` cannot be served. A `compat.ModelConfig` may have `overrides`: fields of `EngineConfig`."""
        if not isinstance(config, EngineConfig):
            config = config.for_engine(**overrides)
        elif overrides:
            raise ValueError(f"an EngineConfig says all: put {', '.join(overrides)} into it")
        for name in config.builder_names:
            builders.load(name)  # before any work
        self.setup = set_up(config)
        self.num_threads = use_threads(self.setup)
        self.tokenizer = load_tokenizer(self.setup.path, config)
        # Before the weights: it reads files, which may be damaged.
        self._processor = InputProcessor(self.setup, self.tokenizer)
        self.extension = build.make_extension(self.setup)  # None at M1
        executor = build.make_executor(self.setup, self.extension)
        self.core = build.make_core(self.setup, self.extension, executor)
        self.scheduler, self.events = self.core.scheduler, self.core.events
        self.loop = build.make_loop(self.core, config)  # M1 to M5: the core itself
        self._is_closed = False
        self._lock = threading.Lock()  # of the one call that has the engine
        self.refusal = ""  # why no request is taken for a while, if so

    @property
    def executor(self) -> Executor:
        """What computes the steps."""
        return self.core.executor

    @staticmethod
    def from_engine_args(engine_args: EngineConfig) -> LLMEngine:
        """Make the engine, by vLLM's name."""
        return make_engine(engine_args)

    @takes_vllm_arguments("request")
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
        """Queue a request; it takes part from the next step on. If it raises, the engine keeps nothing of the request.

        Args:
            prompt: a text, token ids, or a `TextPrompt` or `TokensPrompt`.
            priority: smaller is served first, with `scheduling="priority"`.
            cache_salt: prefixes in the cache are shared only between requests of equal salts.
            stream: report each token as it comes, in the form that `params.output_kind` names; False is FINAL_ONLY.

        Raises:
            ValueError: the id is in use, or the request can never be served.
            RuntimeError: the engine was closed.
        """
        self._require_new(request_id)
        params = SamplingParams() if params is None else params
        seqs = self._processor.process(request_id, prompt, params, priority, cache_salt)
        self._add(seqs, params.output_kind if stream else RequestOutputKind.FINAL_ONLY)

    def _require_new(self, request_id: str) -> None:
        """Raise RuntimeError if the engine was closed, ValueError if it takes none or the id is in use."""
        self.require_open()
        if self.refusal:
            raise ValueError(self.refusal)
        if request_id in self.core.output_processor.requests:
            raise ValueError(f"request id {request_id!r} is in use: choose another, or wait until it has finished")

    def _add(self, seqs: list[Sequence], kind: RequestOutputKind) -> None:
        if seqs[0].params.structured_outputs is not None:
            load_elective(STRUCTURED_OUTPUT, "structured_outputs").add_grammar(self, seqs)
        request_id = seqs[0].request_id
        state = RequestState(request_id, seqs, kind, time.monotonic())
        if self.events.on:
            for event in [request_added(seq, state.metrics.arrival_time) for seq in seqs]:
                self.events.emit(event)
        self.core.output_processor.requests[request_id] = state
        try:
            for seq in seqs:
                self.scheduler.add(seq)
        except BaseException:
            self.core.end([request_id])
            raise

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work, or outputs to hand out."""
        return self.loop.has_unfinished_requests()

    def step(self) -> list[RequestOutput]:
        """Schedule, compute, sample, and hand out what is new. Without work it returns an empty list."""
        self.require_open()
        return self.loop.step()

    def require_open(self) -> None:
        """Raise RuntimeError if the engine was closed."""
        if self._is_closed:
            raise RuntimeError("the engine was closed: make a new one")

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """The call that has the engine. Raises RuntimeError at once if another one has it, in a thread or around this one."""
        if not self._lock.acquire(blocking=False):
            says = "wait until it has returned, or give it all prompts"
            raise RuntimeError(f"the LLM serves another call, and one call at a time has the engine: {says}")
        try:
            yield
        finally:
            self._lock.release()

    def close(self) -> None:
        """End all requests and free the memory of the model. A second call does nothing; beside another call it raises RuntimeError."""
        if self._is_closed:
            return
        with self.one_call():
            self._is_closed = True
            self.core.end(list(self.core.output_processor.requests))
            if (connector := getattr(self.scheduler, "connector", None)) is not None:
                connector.close()
            self.executor.shutdown()
            if self.extension is not None:
                self.extension.close()
        gc.unfreeze()  # for `make_engine` froze: cycles that are frozen are never collected
        gc.collect()
        torch.cuda.empty_cache()  # to the card, for other programs


def make_engine(config: EngineConfig) -> LLMEngine:
    """Make an engine. `gc.freeze` has the garbage collector leave out what is alive now (model, tokenizer), so none of its runs is long."""
    engine = LLMEngine(config)
    gc.collect()
    gc.freeze()
    weakref.finalize(engine, gc.unfreeze).atexit = False  # if nobody closes it; at the end all goes anyway
    return engine
