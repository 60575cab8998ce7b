"""How a request wants its tokens sampled, and when it wants to stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

from folovllm.engine.require import ABOVE_0, Limits, check_fields, require, takes_vllm_arguments

SMALLEST_TEMPERATURE = 1e-5  # below it is greedy: the same choice, and no quotient that overflows
LIMITS = {  # no sample from finite logits overflows within them
    "temperature": Limits(0, 1e6, "from 0 (greedy) to 1e+06"),
    "top_p": Limits(ABOVE_0, 1, "above 0 and at most 1 (keep all)"),
    "min_p": Limits(0, 1, "from 0 (off) to 1"),
    "repetition_penalty": Limits(0.01, 100, "from 0.01 to 100 (1 is off)"),
    "presence_penalty": Limits(-2, 2, "from -2 to 2 (0 is off)"),
    "frequency_penalty": Limits(-2, 2, "from -2 to 2 (0 is off)"),
    "top_k": Limits(-1, works="-1 or 0 (keep all) or at least 1"),
    "seed": Limits(0, works="between 0 and 2**63 - 1"),
    "min_tokens": Limits(0, works="0 or more"),
    "logprobs": Limits(0, works="0 or more"),
    "prompt_logprobs": Limits(0, works="0 or more"),
    "truncate_prompt_tokens": Limits(-1, works="at least 1, or -1 (what fits)"),
}
FRACTIONS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LISTS = ("stop", "stop_token_ids", "bad_words")  # of rules that few requests have; the other ones are None
OTHERS = ("allowed_token_ids", "logit_bias", "structured_outputs", "truncate_prompt_tokens")


class RequestOutputKind(Enum):
    """What the outputs of a request hold while it is served."""

    CUMULATIVE = 0  # all so far
    DELTA = 1  # what is new since the output before
    FINAL_ONLY = 2  # there is one output, at the end


@takes_vllm_arguments("sampling")
@dataclass(slots=True)
class SamplingParams:
    """Sampling and stopping rules of one request, validated when they are made.

    The names and meanings are vLLM's. Penalties come first, on the raw logits; then temperature, min_p, top_k, top_p.

    Attributes:
        n: how many independent answers to sample for the prompt; at most the engine's `max_n`.
        temperature: 0 takes the most likely token (greedy); 1 samples from the model's own distribution.
        top_k: keep the k most likely tokens; -1 or 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches `top_p`.
        min_p: drop tokens less likely than `min_p` times the most likely one.
        seed: the same seed gives the same text, whatever runs beside it; if left out, or -1, one is chosen at random.
        max_tokens: generate at most this many tokens (vLLM's default is 16); None fills the context.
        min_tokens: no end-of-text or stop before this many tokens.
        stop: strings that end the text (and are cut off it unless `include_stop_str_in_output`).
        stop_token_ids: token ids that end the text beside the model's own end-of-text ids.
        ignore_eos: go on past the model's end-of-text ids.
        include_stop_str_in_output: leave the stop string, or the text of the token, that ended the answer in the text.
        logprobs: return the log-probabilities of the chosen and of this many most likely tokens, at most `max_logprobs`.
        prompt_logprobs: the same of every token of the prompt but the first; no cached prefix is used then.
        repetition_penalty: > 1 makes every token seen in prompt or answer less likely (multiplicative); 0.01 to 100.
        presence_penalty: subtracted once from each token that the answer already holds; -2 to 2, as elsewhere.
        frequency_penalty: subtracted once per occurrence in the answer (at most 4,095 of a token count); -2 to 2.
        logit_bias: what is added to the logits of some tokens, by token id; -100 to 100, rounded to float16.
        allowed_token_ids: sample only these tokens; if left out, all.
        bad_words: texts that the answer must not hold, as they stand or after a space.
        skip_special_tokens: leave tokens such as `<|im_end|>` out of the text.
        detokenize: make text of the tokens; without it the text stays empty.
        truncate_prompt_tokens: keep only this many tokens at the end of the prompt; -1 keeps what fits into the context.
        prompt_only: only score the prompt, which may fill the whole context; `max_tokens` must be 1.
        structured_outputs: the grammar of the answer, a `StructuredOutputsParams` or a dictionary of its fields; None is free.
        output_kind: what the outputs hold while the request is served; `LLM.generate` always returns whole answers.

    Raises ValueError if a value is outside its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = field(default=None, metadata={"flag": False})
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = field(default_factory=list)
    skip_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    prompt_only: bool = field(default=False, metadata={"flag": False})
    structured_outputs: Any = field(default=None, metadata={"flag": False})
    output_kind: RequestOutputKind = field(default=RequestOutputKind.CUMULATIVE, metadata={"flag": False})

    def __post_init__(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):  # other forms that vLLM's users write
            if isinstance(value := getattr(self, name), bool):
                setattr(self, name, 1 if value else None)
        self.seed = None if self.seed == -1 else self.seed
        self._validate()
        lists = (getattr(self, name) for name in LISTS)
        has_rules = any(type(own) is not list or own for own in lists)  # others must become lists, too
        if has_rules or any(getattr(self, name) is not None for name in OTHERS):
            from folovllm.sample.sampling_rules import normalize_rules  # here, for most requests have none

            normalize_rules(self)
        if self.temperature < SMALLEST_TEMPERATURE:
            self.temperature = 0.0

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """The parameters that are given; None stands for the default, but for `max_tokens`, where it is no limit."""
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self) -> Self:
        """Another one with the same values: what is done to one of them leaves the other as it is."""
        other = object.__new__(type(self))
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if isinstance(value, list | dict) else value)
        return other

    def _validate(self) -> None:
        check_fields(SamplingParams, {name: getattr(self, name) for name in self.__dataclass_fields__}, LIMITS)
        for name in FRACTIONS:
            setattr(self, name, float(getattr(self, name)))  # what else is a number, tensors may not take
        kind, most = self.output_kind, self.max_tokens
        require(isinstance(kind, RequestOutputKind), f"output_kind is a RequestOutputKind, not {kind}")
        require(not self.prompt_only or most == 1, "prompt_only needs max_tokens=1")
        fits = most is None or self.min_tokens <= most
        require(fits, f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({most})")

    @property
    def has_penalties(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
