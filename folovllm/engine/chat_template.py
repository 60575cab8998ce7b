"""From a conversation to a prompt, through the model's chat template."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from folovllm.models.messages import in_one_line

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
RESERVED = ("self", "messages", "conversations")  # what transformers hands to the template beside its arguments
A_CONVERSATION = 'a conversation is a list of messages {"role": "user", "content": "..."}'


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or several as a list. Raises ValueError for what is none."""
    if not is_list(messages):
        raise ValueError(A_CONVERSATION)
    if not messages:
        raise ValueError("the conversation is empty: give at least one message")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)  # type: ignore[list-item, arg-type]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation.

    Args:
        chat_template: stands in for the model's own.
        add_generation_prompt: go on to where the answer begins.
        continue_final_message: leave the last message open, for the answer to continue it.
        tools: functions that the model may call, for templates that show them.
        chat_template_kwargs: what else the template reads, such as `enable_thinking`.

    Raises:
        ValueError: there is no template, it does not take this, this is no conversation, or `chat_template_kwargs` has a name
            that is another argument's.
    """
    if chat_template is None and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("the model has no chat template: use generate with a plain prompt, or hand one over")
    if not is_list(messages) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(A_CONVERSATION)
    if add_generation_prompt and continue_final_message:
        raise ValueError("continue_final_message=True needs add_generation_prompt=False: no new message is begun")
    options = own_variables(tokenizer, {} if chat_template_kwargs is None else chat_template_kwargs)
    options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    try:
        text: str = tokenizer.apply_chat_template(
            [with_plain_content(message) for message in messages],
            tools=tools,
            chat_template=chat_template,
            **(options | {"tokenize": False}),
        )
    except Exception as error:  # the template is a program of the model's: it may raise whatever there is
        said = in_one_line(error)
        raise ValueError(f"the model's chat template does not take this ({said}): {A_CONVERSATION}") from error
    return text


def own_variables(tokenizer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The template's own variables. Raises ValueError for the arguments of the method that fills it in."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError("chat_template_kwargs must be a dictionary of the template's variables, by their names")
    if taken := sorted({*inspect.signature(tokenizer.apply_chat_template).parameters, *RESERVED} & given.keys()):
        raise ValueError(f"chat_template_kwargs must not hold {taken[0]!r}: leave it out")
    return dict(given)


def with_plain_content(message: Message) -> dict[str, Any]:
    """The message with its text parts joined, a line each. Raises ValueError for a part that is no text."""
    content = message.get("content")
    return {**message, "content": "\n".join(map(_text_of, content or []))} if is_list(content) else dict(message)


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise ValueError(
            f'content of the kind {kind!r} is not supported: give texts, {{"type": "text", "text": "..."}}'
        )
    return text


def is_list(value: object) -> bool:
    """Whether this is a sequence, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str)
