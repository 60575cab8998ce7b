"""A conversation in the terminal: answers stream, Ctrl-C stops one, Ctrl-D ends it all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from folovllm.apps.cli.terminal import stream

if TYPE_CHECKING:
    from folovllm.llm import LLM
    from folovllm.sampling_params import SamplingParams

HELP = "/reset starts anew, /help shows this, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


class Chat:
    """The history of one conversation, and the engine that continues it.

    Invariant: between answers `messages` alternates user and assistant (after a system message, if any), whatever was
    interrupted or refused.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm, self._params = llm, params
        self._num_requests = 0
        self._opening = [{"role": "system", "content": system}] if system else []
        self.notes = Console(stderr=True, highlight=False)
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages: list[dict[str, str]] = list(self._opening)

    def run(self) -> None:
        """Read and answer until the input ends. A question that no longer fits into the context leaves the conversation as it was."""
        if sys.stdin.isatty():
            import readline  # noqa: F401  arrow keys and history in input()

            self.notes.print(HELP, style="dim")
        while (line := self._read()) not in (None, "/quit"):
            if line == "/help":
                self.notes.print(HELP, style="dim")
            elif line == "/reset":
                self.reset()
                self.notes.print("A new conversation.", style="dim")
            elif line:
                try:
                    self.answer(line)
                except ValueError as error:
                    self.notes.print(f"error: {error} (/reset starts a new conversation)", style="red", markup=False)

    def _read(self) -> str | None:
        """The next line, or None at the end of the input. Ctrl-C discards what was typed so far; without a terminal it leaves."""
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            self.notes.print(f"\n{HELP}", style="dim")
            return ""
        except EOFError:
            return None

    def answer(self, question: str) -> str:
        """Stream the answer to stdout and add both to the history; the text before a Ctrl-C counts."""
        messages, text = [*self.messages, {"role": "user", "content": question}], ""
        self._num_requests += 1
        try:
            prompt = self._llm.render_chat(messages)
            for output in stream(self._llm, f"chat-{self._num_requests}", prompt, self._params):
                print(output.outputs[0].delta_text, end="", flush=True)
                text += output.outputs[0].delta_text
        except ValueError:
            print(end="\n" if text else "")  # what follows is a line of its own
            raise
        print()
        self.messages = [*messages, {"role": "assistant", "content": text}]
        return text
