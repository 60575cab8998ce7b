"""The configuration of speculative decoding: vLLM's `speculative_config`, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from folovllm.engine.require import is_whole

if TYPE_CHECKING:
    from folovllm.electives.spec_decode.proposer import Proposer

METHODS = ("ngram", "suffix", "draft_model", "eagle3", "mtp")
HEADS = ("eagle3", "mtp")  # methods whose drafts come from a head of the model
WITH_MODEL = ("draft_model", "eagle3")
DEFAULT_TOKENS = 4
MOST_TOKENS = 64


@dataclass(slots=True, frozen=True)
class SpeculativeConfig:
    """How draft tokens are proposed.

    Attributes:
        method: a name in METHODS; several, joined by "+", are asked in this order until one has a draft; or a `Proposer`.
        num_speculative_tokens: the most draft tokens that a step verifies for one sequence.
        prompt_lookup_max: "ngram" looks for the last so many tokens of a text earlier in it,
        prompt_lookup_min: and for fewer, down to so many.
        adaptive: draft as many tokens as pay, at most `num_speculative_tokens`; else always so many. A `Proposer` of your own is
            always asked.
        model: of "draft_model": a small model with the vocabulary of the large one; of "eagle3": the head's folder. "mtp" has
            its head in the model's own.
    """

    method: str | Proposer = "ngram"
    num_speculative_tokens: int = DEFAULT_TOKENS
    prompt_lookup_max: int = 5
    prompt_lookup_min: int = 2
    adaptive: bool = True
    model: str | None = None

    def __post_init__(self) -> None:
        self._check_method()
        limits = {"num_speculative_tokens": MOST_TOKENS, "prompt_lookup_max": 1 << 20, "prompt_lookup_min": 1 << 20}
        for name, most in limits.items():
            value = getattr(self, name)
            if not (is_whole(value) and 1 <= value <= most):
                raise ValueError(f"{name} must be a whole number from 1 to {most}, not {value!r}")
        if not isinstance(self.model, str | None):
            raise ValueError(f"the model of speculative_config must be a text, not {self.model!r}")
        if not isinstance(self.adaptive, bool):
            raise ValueError(f"adaptive must be True or False, not {self.adaptive!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}: lower it"
            )

    def _check_method(self) -> None:
        for name in self.methods:
            if name not in METHODS:
                raise ValueError(
                    f"unknown speculative method {name!r}: choose one of {', '.join(METHODS)}, or join some by +"
                )
        if isinstance(self.method, str):
            drafters = [name for name in self.methods if name in (*WITH_MODEL, *HEADS)]
            if len(drafters) > 1:
                raise ValueError(f"methods {' and '.join(drafters)} do not work together: choose one of them")
            if (self.model is not None) != any(name in WITH_MODEL for name in drafters):
                raise ValueError(
                    'method "draft_model" needs a model, a small one, "eagle3" needs a head, and no other method takes one; '
                    'speculative_config names it: {"method": "draft_model", "model": "stories-draft"}'
                )
            return
        from folovllm.electives.spec_decode.proposer import Proposer

        if not isinstance(self.method, Proposer):
            raise ValueError(
                f"the speculative method must be a name or a Proposer (an object, not its class), not {self.method!r}"
            )

    @property
    def methods(self) -> tuple[str, ...]:
        """Return the names in `method`; none where it is a proposer."""
        return tuple(self.method.split("+")) if isinstance(self.method, str) else ()

    @property
    def head(self) -> str | None:
        """Return the method whose drafts come from a head; None without one."""
        return next((name for name in self.methods if name in HEADS), None)

    @classmethod
    def parse(cls, given: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Return the configuration of a dict, or of one in JSON, with vLLM's keys. Raises ValueError for anything else."""
        if isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except json.JSONDecodeError as error:
                raise ValueError(f'speculative_config is no JSON, such as {{"method": "ngram"}}: {error}') from error
        if not isinstance(given, Mapping):
            raise ValueError(f"speculative_config must be a dict, not {given!r}")
        given = dict(given)
        if "method" not in given and given.get("model") is not None:  # vLLM's rule
            given["method"] = "ngram" if given["model"] in ("ngram", "[ngram]") else "draft_model"
        if given.get("method") == "ngram" and given.get("model") in ("ngram", "[ngram]"):
            del given["model"]
        known = [field.name for field in fields(cls)]
        if unknown := sorted(map(str, given.keys() - set(known))):
            raise ValueError(f"speculative_config knows {', '.join(known)}, not {', '.join(unknown)}: leave it out")
        return cls(**{name: value for name, value in given.items() if value is not None})


def gather(
    whole: str | Mapping[str, Any] | SpeculativeConfig | None, method: str | Proposer | None, num_tokens: int | None
) -> SpeculativeConfig:
    """Return one configuration of three fields of `EngineConfig`: the whole of it, and two parts that may be given alone."""
    given: dict[str, Any] = {"method": method, "num_speculative_tokens": num_tokens}
    given = {name: value for name, value in given.items() if value is not None}
    if whole is not None:
        return replace(SpeculativeConfig.parse(whole), **given)
    if "method" not in given:
        raise ValueError("num_speculative_tokens needs a speculative_method, or a speculative_config")
    return SpeculativeConfig(**given)
