"""What a model thinks before it answers: text between <think> and </think>, taken out of the answer."""

from __future__ import annotations

from folovllm.server.held_back import common_part

OPENING, CLOSING = "<think>", "</think>"
PARSERS = ("qwen3", "deepseek_r1")  # vLLM's names


class ReasoningSplitter:
    """Cuts text that comes in pieces into what is thought and what is answered, wherever the pieces are torn.

    New lines behind the two tags belong to neither.
    """

    def __init__(self, parser: str, prompt: str) -> None:
        """`prompt` may have opened the thinking, or closed it: then the answer begins at once.

        What "deepseek_r1" answers begins in thought even if nothing says so; "qwen3" thinks if it says so.
        """
        begun, over = prompt.rstrip().endswith(OPENING), prompt.rstrip().endswith(CLOSING)
        self._thinks = begun or (parser == "deepseek_r1" and not over)
        self._is_over = over
        self._pending = ""  # text that may turn out to be a tag
        self._at_start = True  # of the thought or the answer: new lines are passed over

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """What `text` adds to the thought, and to the answer. With `last` nothing is held back any more."""
        self._pending += text
        thought = ""
        if not self._is_over and not self._look_for_opening(last):
            return "", ""
        if not self._is_over:
            thought = self._look_for_closing(last)
        if not self._is_over:
            return thought, ""
        answer, self._pending = self._pending, ""
        return thought, self._begin(answer)

    def _look_for_opening(self, last: bool) -> bool:
        """Whether it is known by now if the text begins with a thought."""
        begins = self._pending.lstrip()
        if begins.startswith(OPENING):
            self._thinks, self._pending = True, begins[len(OPENING) :]
        elif OPENING.startswith(begins) and not last:
            return False
        elif not self._thinks:
            self._is_over, self._at_start = True, False
        return True

    def _look_for_closing(self, last: bool) -> str:
        """As much of the text as is certainly thought."""
        thought, tag, rest = self._pending.partition(CLOSING)
        if tag:
            thought, self._pending = self._begin(thought), rest
            self._is_over = self._at_start = True
            return thought
        held = 0 if last else common_part(thought, CLOSING)
        self._pending = thought[len(thought) - held :]
        return self._begin(thought[: len(thought) - held])

    def _begin(self, text: str) -> str:
        """`text` without the new lines that it begins with, where a part begins."""
        if self._at_start:
            text = text.lstrip("\n")
            self._at_start = not text
        return text


def thinks_first(prompt: str) -> bool:
    """Whether a model that thinks does so after this prompt: not where the template has closed the thought already."""
    return not prompt.rstrip().endswith(CLOSING)
