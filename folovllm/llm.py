"""`LLM`: the engine for offline use. Prompts in, answers out, in order."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Self

from folovllm.config import EngineConfig
from folovllm.engine.ctrl_c import ctrl_c
from folovllm.engine.inputs import Prompt, PromptRequest, as_requests
from folovllm.engine.llm_calls import LLMCalls
from folovllm.engine.llm_engine import make_engine
from folovllm.engine.progress import Progress
from folovllm.engine.require import takes_vllm_arguments
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams


class LLM(LLMCalls):
    """A model that answers prompts: the embedded one if `model` is left out. All fields of `EngineConfig` are keywords here.

    Raises ValueError if something is not available here, before any weight is loaded where that is possible.
    """

    def __init__(self, model: str | None = None, **overrides: Any) -> None:
        if model is not None:
            overrides["model"] = model
        self.engine = make_engine(EngineConfig(**overrides))
        self._ids = itertools.count()

    @takes_vllm_arguments("request")
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        on_answer: Callable[[RequestOutput], object] = lambda output: None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; results come in their order. After Ctrl-C no request is left, and the next call works.

        Args:
            prompts: a string, a list of token ids, a `TextPrompt` or a `TokensPrompt`, or a list of these.
            sampling_params: one for all, or one for each prompt; None takes `get_default_sampling_params()`.
            use_tqdm: show progress with the speed of prefill and decode, in a terminal.
            on_answer: called with each answer in the order of the prompts, as soon as it and those before it are there.
            priority: one for all, or one for each prompt; smaller is served first, with `scheduling="priority"`.

        Raises:
            ValueError: a prompt cannot be served; raised before any work starts.
            RuntimeError: the engine was closed, or serves another call: one call at a time.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        requests = as_requests(prompts, params, priority or 0)
        with self.engine.one_call():
            return self._answer(requests, use_tqdm and sys.stderr.isatty(), on_answer)

    def _answer(
        self, requests: Sequence[PromptRequest], bar: bool, on_answer: Callable[[RequestOutput], object]
    ) -> list[RequestOutput]:
        """Add the requests, step until none is left, and return the answers in order."""
        self.engine.require_open()
        ids = [f"generate-{next(self._ids)}" for _ in requests]
        answers: dict[str, RequestOutput] = {}
        waiting = deque(ids)  # for `on_answer`
        with ctrl_c() as pressed, Progress(self.engine, len(ids)) if bar else nullcontext() as shown:
            try:
                for id_, (prompt, params, priority) in zip(ids, requests, strict=True):
                    self.engine.add_request(id_, prompt, params, priority=priority, stream=False)
                while self.engine.has_unfinished_requests():
                    finished = self.engine.step()
                    answers |= {output.request_id: output for output in finished}
                    if shown is not None:
                        shown.update(len(finished))
                    while waiting and waiting[0] in answers:
                        on_answer(answers[waiting.popleft()])
                    if pressed.is_set():
                        raise KeyboardInterrupt
            finally:  # an error or Ctrl-C leaves no request behind
                self.engine.core.end(ids)
        return [answers[id_] for id_ in ids]

    def close(self) -> None:
        """Give everything back. A second call does nothing; beside another call it raises RuntimeError."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
