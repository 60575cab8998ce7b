"""Rules of sampling that few requests have: stop strings, chosen and forbidden tokens, grammars, and prompts that are cut."""

from __future__ import annotations

from numbers import Integral, Real
from reprlib import repr as shown
from typing import Any

from folovllm.engine.require import is_whole, require
from folovllm.plugins import STRUCTURED_PARAMS, load_elective

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def normalize_rules(params: Any) -> None:
    """Put the rules of a `SamplingParams` into one form, and check them. Raises ValueError with what works."""
    if isinstance(params.stop, str):
        params.stop = [params.stop]
    for name in ("stop", "stop_token_ids", "bad_words"):
        if getattr(params, name) is None:
            setattr(params, name, [])
    if params.structured_outputs is not None:
        params.structured_outputs = load_elective(STRUCTURED_PARAMS, "structured_outputs")(params.structured_outputs)
    kinds: dict[str, tuple[type, str]] = {"stop": (str, "stop strings"), "bad_words": (str, "texts")}
    kinds |= dict.fromkeys(("stop_token_ids", "allowed_token_ids"), (Integral, "token ids (whole numbers)"))
    for name, (kind, what) in kinds.items():
        value = getattr(params, name)
        fits = value is None or (isinstance(value, list | tuple) and all(_is_a(v, kind) for v in value))
        require(fits, f"{name} must be a list of {what}, not {shown(value)}")
    params.logit_bias = _bias(params.logit_bias) if params.logit_bias else None
    has_bad_text, none_allowed = any(REPLACEMENT in stop for stop in params.stop), params.allowed_token_ids == []
    rules = {
        "truncate_prompt_tokens must be at least 1, or -1 (what fits), not 0": params.truncate_prompt_tokens != 0,
        "a stop string must not be empty": all(params.stop),
        f"a stop string must not hold {REPLACEMENT!r}: it stands for bytes that are no text": not has_bad_text,
        "stop strings are found in text: leave detokenize at True": not params.stop or params.detokenize,
        "allowed_token_ids must not be empty, or nothing could be sampled: leave it out": not none_allowed,
        "a bad word must not be empty": all(word.strip() for word in params.bad_words),
    }
    for sentence, holds in rules.items():
        require(holds, sentence)


def _is_a(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _bias(given: Any) -> dict[int, float]:
    """Biases by token id; JSON's names of fields, which are texts, are ids too."""
    says = f"logit_bias must give token ids a number from -100 to 100 each, as in {{1234: -5.0}}, not {shown(given)}"
    require(isinstance(given, dict), says)
    for token, value in given.items():
        is_id = is_whole(token) or (isinstance(token, str) and token.isdecimal() and len(token) < 20)
        require(is_id and _is_a(value, Real) and -100 <= value <= 100, says)
    biases = {int(token): float(value) for token, value in given.items()}
    require(len(biases) == len(given), "logit_bias names a token twice, as 7 and 007 do: give each token one number")
    return biases
