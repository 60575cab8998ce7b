"""What a prompt can be, and what one call may bring for many: everything becomes one `PromptRequest` a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from collections.abc import Sequence as SequenceOf
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

from folovllm.engine.prompt_forms import PromptParts, TextPrompt, TokensPrompt, parse_dict, token_ids_of
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Prompt = str | SequenceOf[int] | TextPrompt | TokensPrompt


class PromptRequest(NamedTuple):
    """One of the prompts of a call, with what belongs to it."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0


def parse_prompt(prompt: Prompt) -> PromptParts:
    """Take a prompt apart. Raises ValueError if it is none, or brings something that no text model can use."""
    if isinstance(prompt, str):
        return PromptParts(text=prompt)
    return parse_dict(prompt) if isinstance(prompt, Mapping) else PromptParts(token_ids=token_ids_of(prompt))


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
    """The requests of a call; a flat list of numbers is one prompt. Raises ValueError unless there is one of each for all, or for each."""
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
