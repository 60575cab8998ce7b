"""`LLM`: the engine for offline use. Prompts in, answers out, in order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

from tqdm import tqdm

from folovllm.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from folovllm.chat_template import Message, as_conversations, render
from folovllm.config import EngineConfig
from folovllm.electives import ROLLOUTS, require
from folovllm.engine.input_processor import encode_within
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.events import Event, StepEnded
from folovllm.inputs import Prompt, Request, TokensPrompt, as_requests
from folovllm.interrupts import Answers, Interrupted, interrupts
from folovllm.models.files import generation_defaults
from folovllm.outputs import RequestOutput
from folovllm.require import REQUEST, also_takes
from folovllm.sampling_params import SamplingParams


class LLM:
    """A model that answers prompts.

    Args:
        model: the embedded one if left out; see `EngineConfig`, whose fields are all keywords here.

    Raises:
        ValueError: something cannot be had here; raised before any weight is loaded where that is possible.
    """

    def __init__(self, model: str | None = None, **overrides: Any) -> None:
        if model is not None:
            overrides["model"] = model
        self.engine = make_engine(EngineConfig(**overrides))
        self._ids = itertools.count()
        self._turn = threading.Lock()
        self._whose_turn: int | None = None  # the thread's number

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, which is transformers'."""
        return self.engine.get_tokenizer()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can be asked through `chat`."""
        return getattr(self.engine.tokenizer, "chat_template", None) is not None

    @property
    def llm_engine(self) -> LLMEngine:
        """`engine`, by vLLM's name."""
        return self.engine

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of calls that pass none: those of the model's generation_config.json, else our defaults."""
        return SamplingParams.from_optional(**generation_defaults(self.engine.setup.path))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Raises ValueError where there is no cache."""
        return self.engine.reset_prefix_cache()

    def update_weights(self, weights: Any, in_flight: str = "wait") -> None:
        """Give the model other weights: a checkpoint's folder, or tensors by its names (`folovllm.rollouts.weights`)."""
        _rollouts().update_weights(self.engine, weights, in_flight)

    def get_weights(self) -> dict[str, Any]:
        """The weights by the checkpoint's names. They are the engine's own memory: an update changes them."""
        return _rollouts().get_weights(self.engine)

    def sleep(self, level: int = 1) -> None:
        """Give the memory of cache and weights back; level 1 keeps the weights on the host (`folovllm.rollouts.sleep`)."""
        _rollouts().sleep(self.engine, level)

    def wake_up(self, weights: Any = None) -> None:
        """End the sleep. After level 2 the weights are loaded again, or are the ones given here."""
        _rollouts().wake_up(self.engine, weights)

    @also_takes(REQUEST)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        on_answer: Callable[[RequestOutput], object] = lambda output: None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts; results come in their order. Calls from several threads take turns.

        Args:
            prompts: a string, a list of token ids, a `TextPrompt` or a `TokensPrompt`, or a list of these.
            sampling_params: one for all, or one for each prompt; None takes `get_default_sampling_params()`. Answers end
                after 256 tokens unless `max_tokens` says otherwise (vLLM: 16).
            use_tqdm: show progress with the speed of prefill and decode.
            on_answer: called with each answer in the order of the prompts, as soon as it and those before it are there.
            priority: one for all, or one for each prompt; smaller is served first, with `scheduling="priority"`.

        Raises:
            Interrupted: a KeyboardInterrupt (Ctrl-C) whose `outputs` are the answers so far.
            ValueError: a prompt cannot be served, or `engine` still serves requests that were added to it directly, whose
                outputs would be lost; raised before any work starts.
            RuntimeError: the engine was closed, or `on_answer` calls this.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._run(as_requests(prompts, params, priority or 0), use_tqdm, on_answer)

    @also_takes(REQUEST)
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role", "content"}, put through the model's chat template.

        The options are those of `chat_template.render`. In the outputs `prompt` is the text that the template made.
        """
        prompts = [
            self._render(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The token ids of a conversation, up to where the answer begins; the options are those of `chat`."""
        return list(self._render(messages, **options)["prompt_token_ids"])

    def _render(self, messages: Sequence[Message], **options: Any) -> TokensPrompt:
        text = render(self.tokenizer, messages, **options)
        ids = encode_within(self.engine.setup.max_model_len, self.tokenizer, text, add_special_tokens=False)
        return TokensPrompt(prompt=text, prompt_token_ids=ids)

    def beam_search(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearchOutput]:
        """For each prompt the `beam_width` most likely answers that a search over beams finds."""
        return search_beams(self.engine, partial(self.generate, use_tqdm=False), prompts, params)

    def _run(
        self, requests: list[Request], use_tqdm: bool, on_answer: Callable[[RequestOutput], object]
    ) -> list[RequestOutput]:
        ids = [f"generate-{next(self._ids)}" for _ in requests]
        answers = Answers(ids, on_answer)
        self.engine.require_open()  # before the turn, which nobody ends in a fork
        if self._whose_turn == threading.get_ident():
            raise RuntimeError(
                "on_answer cannot ask the LLM that calls it: collect the answers, and ask when generate has returned"
            )
        with self._turn, interrupts() as ctrl_c:
            self.engine.require_idle()
            self._whose_turn = threading.get_ident()
            try:
                for id_, r in zip(ids, requests, strict=True):
                    self.engine.add_request(id_, r.prompt, r.params, priority=r.priority, stream=False)
                    _heed(ctrl_c)
                with (
                    tqdm(total=len(ids), desc="Generating", unit="req", disable=not use_tqdm) as bar,
                    self._speeds(bar),
                ):
                    while self.engine.has_unfinished_requests():
                        finished = self.engine.step()
                        bar.update(len(finished))
                        if finished:
                            with tqdm.external_write_mode():  # the bar makes way for what is printed
                                answers.add(finished)
                        _heed(ctrl_c)
            except KeyboardInterrupt:
                raise Interrupted(answers.in_order()) from None
            finally:  # an error or Ctrl-C leaves no request behind
                self._whose_turn = None
                self.engine.abort_request(ids)
        outputs = [output for output in answers.in_order() if output is not None]
        if len(outputs) < len(ids):
            raise RuntimeError("the engine was closed before all was answered")
        return outputs

    @contextmanager
    def _speeds(self, bar: Any) -> Iterator[None]:
        """Within this, speeds stand beside a bar; where none is shown, nobody listens."""
        if bar.disable:
            yield
            return
        speeds = Speeds(bar)
        self.engine.subscribe(speeds)
        try:
            yield
        finally:
            self.engine.unsubscribe(speeds)

    def close(self) -> None:
        """Give everything back; the object is of no use afterwards. Twice is once."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Speeds:
    """A listener that shows tokens a second of prefill and of decode beside a progress bar, at most ten times a second."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._sums = {"prefill": (0, 0.0), "decode": (0, 0.0)}  # tokens, seconds
        self._shown = 0.0

    def __call__(self, events: Sequence[Event]) -> None:
        """Add the steps that ended. A step that computes more tokens of a sequence than it samples counts as prefill."""
        for step in (event for event in events if isinstance(event, StepEnded)):
            is_prefill = any(s.num_new_tokens > max(1, s.num_samples) for s in step.output.scheduled_seqs)
            kind = "prefill" if is_prefill else "decode"
            tokens, seconds = self._sums[kind]
            self._sums[kind] = (tokens + step.output.num_tokens, seconds + step.end - step.start)
            if (now := time.monotonic()) - self._shown > 0.1:
                self._shown = now
                self._bar.set_postfix({k: f"{n / s:.0f} tok/s" for k, (n, s) in self._sums.items() if s}, refresh=True)


def _rollouts() -> Any:
    return require(ROLLOUTS, "a change of weights, or sleep,")


def _heed(ctrl_c: threading.Event) -> None:
    if ctrl_c.is_set():
        raise KeyboardInterrupt
