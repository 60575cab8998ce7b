"""Prompts that are no plain text: token ids, and dictionaries."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, NotRequired, TypedDict

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


class PromptParts(NamedTuple):
    """A prompt taken apart. One of `text` and `token_ids` is there at least; the ids count."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def parse_dict(prompt: Mapping[str, Any]) -> PromptParts:
    """Take a `TextPrompt` or a `TokensPrompt` apart. Raises ValueError if it brings something that no text model can use."""
    fields = {name: value for name, value in prompt.items() if value is not None}
    text, ids, cache_salt = (fields.pop(name, None) for name in ("prompt", "prompt_token_ids", "cache_salt"))
    if fields:
        raise ValueError(f"{next(iter(fields))!r} in a prompt is not supported: {A_PROMPT}")
    if not isinstance(text, str | None) or (text is None and ids is None):
        raise ValueError(A_PROMPT)
    return PromptParts(text, None if ids is None else token_ids_of(ids), cache_salt)


def token_ids_of(ids: Any) -> list[int]:
    """The ids as a list. Raises ValueError if these are no whole numbers."""
    try:
        if isinstance(ids, str | bytes | Mapping):  # numbers, but hardly meant as ids
            raise TypeError("not token ids")
        return list(map(operator.index, ids))
    except TypeError as error:
        raise ValueError(A_PROMPT) from error
