"""Prompts that may not fit: they are refused without reading them to their end, or cut where the request says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from folovllm.engine.inputs import encode
from folovllm.engine.prompt_forms import PromptParts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_within(limit: int, tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> list[int]:
    """As `encode`, but a text of far more than `limit` tokens is refused without reading it to its end.

    Only the tokens around a cut depend on what comes after it, so twice the limit, and some, is far more.
    """
    enough = 2 * limit + 64
    size = 4 * enough  # characters: about as many as English takes for that
    while size < len(text):
        if len(encode(tokenizer, text[:size], **options)) > enough:
            raise too_long(f"more than {limit}", limit)
        size *= 2
    return encode(tokenizer, text, **options)


def too_long(count: str, limit: int) -> ValueError:
    """The error of a prompt that leaves no room for an answer."""
    return ValueError(
        f"the prompt has {count} tokens, and the context of {limit} leaves no room for an answer: "
        "shorten it, or raise max_model_len"
    )


def encode_whole(tokenizer: PreTrainedTokenizerBase, parts: PromptParts) -> list[int]:
    """All tokens of a prompt, however long it is."""
    return encode(tokenizer, parts.text or "") if parts.token_ids is None else parts.token_ids
