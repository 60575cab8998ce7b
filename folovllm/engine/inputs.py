"""What a prompt can be, and what one call may bring for many: everything becomes one `PromptRequest` a prompt."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sized
from collections.abc import Sequence as SequenceOf
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict, TypeGuard, cast

from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

A_PROMPT = (
    'a prompt is a string or a list of token ids (whole numbers), or one of them as {"prompt": ...} or '
    '{"prompt_token_ids": ...}'
)


class TextPrompt(TypedDict):
    """A text that is to be continued."""

    prompt: str
    cache_salt: NotRequired[str | None]


class TokensPrompt(TypedDict):
    """Token ids that are to be continued; `prompt`, their text, is only handed through to the output."""

    prompt_token_ids: SequenceOf[int]
    prompt: NotRequired[str | None]
    cache_salt: NotRequired[str | None]


Prompt = str | SequenceOf[int] | TextPrompt | TokensPrompt


class PromptParts(NamedTuple):
    """A prompt taken apart. One of `text` and `token_ids` is there at least; the ids count."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


class PromptRequest(NamedTuple):
    """One of the prompts of a call, with what belongs to it."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0


def parse_prompt(prompt: Prompt) -> PromptParts:
    """Take a prompt apart. Raises ValueError if it is none, or brings something that no text model can use."""
    if isinstance(prompt, str):
        return PromptParts(text=prompt)
    if not isinstance(prompt, Mapping):
        return PromptParts(token_ids=_token_ids(prompt))
    fields = {name: value for name, value in prompt.items() if value is not None}
    text, ids, cache_salt = (fields.pop(name, None) for name in ("prompt", "prompt_token_ids", "cache_salt"))
    if fields:
        raise ValueError(f"{next(iter(fields))!r} in a prompt is not supported: {A_PROMPT}")
    if not isinstance(text, str | None) or (text is None and ids is None):
        raise ValueError(A_PROMPT)
    return PromptParts(text, None if ids is None else _token_ids(ids), cast("str | None", cache_salt))


def _token_ids(ids: Any) -> list[int]:
    try:
        if isinstance(ids, str | bytes | Mapping):  # numbers, but hardly meant as ids
            raise TypeError("not token ids")
        return list(map(operator.index, ids))
    except TypeError as error:
        raise ValueError(A_PROMPT) from error


def is_one_prompt(prompts: Prompt | SequenceOf[Prompt]) -> TypeGuard[Prompt]:
    """Whether this is a prompt, and not a list of them. What is neither counts as one, and is refused as such later."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sized):
        return True
    return len(prompts) > 0 and all(isinstance(item, Integral) for item in prompts)


def as_requests(
    prompts: Prompt | SequenceOf[Prompt],
    sampling_params: SamplingParams | SequenceOf[SamplingParams],
    priority: int | SequenceOf[int] = 0,
) -> list[PromptRequest]:
    """The requests of a call with one prompt or a list of them; a flat list of numbers is one prompt.

    Raises:
        ValueError: parameters or priorities are neither one for all nor one for each prompt.
    """
    items = [prompts] if is_one_prompt(prompts) else list(cast("SequenceOf[Prompt]", prompts))
    params = _one_each(sampling_params, SamplingParams, len(items), "sampling_params", "a SamplingParams")
    priorities = _one_each(priority, int, len(items), "priority", "a whole number")
    return [PromptRequest(*parts) for parts in zip(items, params, priorities, strict=True)]


def _one_each(value: Any, kind: type, count: int, name: str, what: str) -> list[Any]:
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, SequenceOf) or isinstance(value, str):
        raise ValueError(f"{name} must be {what}, not {value!r}; or a list with one for each prompt")
    if len(value) != count:
        raise ValueError(f"{len(value)} {name} for {count} prompts: give one for all, or one for each")
    return list(value)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> list[int]:
    """The token ids of a text. Raises ValueError if it holds half a character (a lone surrogate), which has no bytes."""
    try:
        return list(tokenizer.encode(text, **options))
    except TypeError as error:
        raise ValueError("the prompt is not valid Unicode: was it read in another encoding?") from error
