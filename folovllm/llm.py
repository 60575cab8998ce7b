"""`LLM`: the engine for offline use. Prompts in, answers out, in order."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from numbers import Integral
from typing import Any, Self, cast

from tqdm import tqdm

from folovllm.config import EngineConfig
from folovllm.engine.input_processor import Prompt, encode_within
from folovllm.engine.overlap import make_engine
from folovllm.interrupts import Answers, Interrupted, interrupts
from folovllm.models.json_files import in_one_line
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams

Message = Mapping[str, str]  # {"role": "user", "content": "..."}
A_CONVERSATION = 'a conversation is a list of messages {"role": "user", "content": "..."}'


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

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the model can be asked through `chat`."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        on_answer: Callable[[RequestOutput], object] = lambda output: None,
    ) -> list[RequestOutput]:
        """Answer prompts; results come in their order. Calls from several threads take turns.

        Args:
            prompts: a string, a list of token ids, or a list of either.
            sampling_params: one for all, or one for each prompt.
            use_tqdm: show progress with the speed of prefill and decode.
            on_answer: called with each answer in the order of the prompts, as soon as it and those before it are there.

        Raises:
            Interrupted: a KeyboardInterrupt (Ctrl-C) whose `outputs` are the answers so far.
            ValueError: a prompt cannot be served, or `engine` still serves requests that were added to it directly, whose
                outputs would be lost; raised before any work starts.
            RuntimeError: the engine was closed.
        """
        items = as_prompt_list(prompts)
        return self._run(items, spread_params(sampling_params, len(items)), use_tqdm, on_answer)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several: lists of {"role", "content"}, put through the model's chat template."""
        if not _is_list(messages):
            raise ValueError(A_CONVERSATION)
        if not messages:
            raise ValueError("the conversation is empty: give at least one message")
        several = not isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        prompts = [self.render_chat(conversation, **template_options) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def render_chat(self, messages: Sequence[Message], **template_options: Any) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        if not self.has_chat_template:
            raise ValueError("the model has no chat template: use generate with a plain prompt")
        if not _is_list(messages) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(A_CONVERSATION)
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **template_options
            )
        except Exception as error:  # the template is a program of the model's: it may raise whatever there is
            said = in_one_line(error)
            raise ValueError(f"the model's chat template does not take this ({said}): {A_CONVERSATION}") from error
        return encode_within(self.engine.setup.max_model_len, self.tokenizer, text, add_special_tokens=False)

    def _run(
        self,
        prompts: list[Prompt],
        params: list[SamplingParams],
        use_tqdm: bool,
        on_answer: Callable[[RequestOutput], object],
    ) -> list[RequestOutput]:
        ids = [f"generate-{next(self._ids)}" for _ in prompts]
        answers = Answers(ids, on_answer)
        self.engine.require_open()  # before the turn, which nobody ends in a fork
        with self._turn, interrupts() as ctrl_c:
            if self.engine.has_unfinished_requests():
                raise ValueError("the engine has requests of its own: step it until they end, or abort them, first")
            try:
                for request_id, prompt, p in zip(ids, prompts, params, strict=True):
                    self.engine.add_request(request_id, prompt, p, stream=False)
                    _heed(ctrl_c)
                with tqdm(total=len(ids), desc="Generating", unit="req", disable=not use_tqdm) as bar:
                    for finished in self._steps(bar):
                        if finished:
                            with tqdm.external_write_mode():  # the bar makes way for what is printed
                                answers.add(finished)
                        _heed(ctrl_c)
            except KeyboardInterrupt:
                raise Interrupted(answers.in_order()) from None
            finally:  # an error or Ctrl-C leaves no request behind
                for request_id in filter(self.engine.has_request, ids):
                    self.engine.abort_request(request_id)
        outputs = [output for output in answers.in_order() if output is not None]
        if len(outputs) < len(ids):
            raise RuntimeError("the engine was closed before all was answered")
        return outputs

    def _steps(self, bar: Any) -> Iterable[list[RequestOutput]]:
        """What each step finished; the bar shows tokens a second of prefill and of decode."""
        speeds = {"prefill": (0, 0.0), "decode": (0, 0.0)}
        shown = 0.0
        while self.engine.has_unfinished_requests():
            finished = self.engine.step()
            step = self.engine.last_stats
            if not bar.disable and step is not None:
                kind, n = (
                    ("prefill", step.num_prefill_tokens) if step.num_prefill_tokens else ("decode", step.num_tokens)
                )
                speeds[kind] = (speeds[kind][0] + n, speeds[kind][1] + step.seconds)
                if (now := time.monotonic()) - shown > 0.1:
                    shown = now
                    bar.set_postfix({k: f"{n / s:.0f} tok/s" for k, (n, s) in speeds.items() if s}, refresh=True)
            bar.update(len(finished))
            yield finished

    def close(self) -> None:
        """Give everything back; the object is of no use afterwards. Twice is once."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _heed(ctrl_c: threading.Event) -> None:
    if ctrl_c.is_set():
        raise KeyboardInterrupt


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list; a flat list of numbers is one prompt."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sized):
        return [cast("Prompt", prompts)]  # of these the engine takes only strings, and says so
    if len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def spread_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One `SamplingParams` for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts: give one for all, or one for each")
    return list(params)
