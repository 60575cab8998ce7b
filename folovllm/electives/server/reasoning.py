"""What a model thinks before it answers: text between <think> and </think>, taken out of the answer."""

from __future__ import annotations

import re

OPENING, CLOSING = "<think>", "</think>"
PARSERS = ("qwen3", "deepseek_r1")  # vLLM's names
TAG = re.compile(f"{OPENING}|{CLOSING}")


class ReasoningSplitter:
    """Cuts text that comes in pieces into thought and answer, wherever the pieces are torn.

    A thought goes from an opening tag at the beginning to the first closing tag; other tags are text. New lines behind these
    two tags belong to neither part.
    """

    def __init__(self, parser: str, prompt: str, begun: str = "") -> None:
        """`begun`: the part of the answer that stands at the end of `prompt`, if the client wrote its beginning.

        The last tag in it, or else one at the end of the prompt, says whether the model thinks or answers. Without one the
        answer begins in thought for "deepseek_r1", and for "qwen3" if its text begins with the tag.
        """
        self._thinks = parser == "deepseek_r1"
        self._may_open = True  # at the beginning of the text
        self.is_over = False  # the thought, or there is none
        self._pending = ""  # text that may turn out to be a tag
        self._at_start = True  # of the thought or the answer: new lines are passed over
        text = last_turn(prompt, begun.strip())
        if tags := list(TAG.finditer(text)):
            self._thinks, self.is_over, text = True, tags[-1][0] == CLOSING, text[tags[-1].end() :]
        self.feed(text)

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """What `text` adds to the thought, and to the answer. With `last` nothing is held back any more."""
        self._pending += text
        if self._may_open and not self.is_over:
            begins = self._pending.lstrip()
            if begins != OPENING and OPENING.startswith(begins) and not last:
                return "", ""
            self._may_open = False
            if begins.startswith(OPENING):
                self._thinks, self._pending = True, begins.removeprefix(OPENING)
            elif not self._thinks:
                self.is_over, self._at_start = True, False
        thought = ""
        if not self.is_over:
            thought, tag, rest = self._pending.partition(CLOSING)
            held = 0 if tag or last else common_part(thought, CLOSING)
            thought, self._pending = thought[: len(thought) - held], thought[len(thought) - held :]
            thought = self._begin(thought)
            if not tag:
                return thought, ""
            self._pending, self.is_over, self._at_start = rest, True, True
        answer, self._pending = self._pending, ""
        return thought, self._begin(answer)

    def _begin(self, text: str) -> str:
        """`text` without the new lines that it begins with, where a part begins."""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text


def last_turn(prompt: str, begun: str) -> str:
    """The end of a prompt, from the tag on with which the template begins the answer, or else from what the client began."""
    at = prompt.rfind(begun) if begun else -1
    head = prompt if at < 0 else prompt[:at]
    stem = head.rstrip()
    tag = next((tag for tag in (OPENING, CLOSING) if stem.endswith(tag)), "")
    return prompt[len(stem) - len(tag) if tag else len(head) :]


def common_part(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`: they are not shown yet."""
    most = min(len(text), len(tag) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(tag[:n])), 0)
