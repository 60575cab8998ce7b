"""Completions that begin with their prompt and its log-probabilities: `echo`."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable

import msgspec

from folovllm.engine.output_processor import Piece, with_text
from folovllm.outputs import TokenLogprob
from folovllm.server.answers import CompletionWriter, completion_logprobs
from folovllm.server.replies import CompletionChoice, CompletionLogprobs, Usage


class EchoWriter(CompletionWriter):
    """A `CompletionWriter` whose answers begin with their prompts: as text, and with log-probabilities where asked for."""

    def __init__(
        self,
        model: str,
        n: int,
        decode: Callable[[list[int]], str],
        num_logprobs: int | None,
        prompt_alone: bool,
        shows_prompt: bool = False,
    ) -> None:
        """`decode` is for prompts that came as ids; `prompt_alone` leaves the answers out."""
        super().__init__(model, n, shows_prompt)
        self._decode, self._num_logprobs, self._prompt_alone = decode, num_logprobs, prompt_alone
        self._begun: set[int] = set()  # answers whose prompt was said
        self._has_frames = not prompt_alone

    def usage(self) -> Usage:
        """As inherited; an answer that nobody sees counts nothing."""
        usage = super().usage()
        if self._prompt_alone:
            usage = msgspec.structs.replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)
        return usage

    def choice(self, index: int, answer: Piece) -> CompletionChoice:
        """As inherited; the first piece begins with the prompt."""
        text, logprobs = ("", None) if index in self._begun else self._prompt(index)
        self._begun.add(index)
        choice: CompletionChoice = super().choice(index, answer)
        if self._prompt_alone:
            choice.text, choice.logprobs = "", None
            choice.finish_reason, choice.stop_reason = answer.finish_reason and "length", None
        choice.text = text + choice.text
        if logprobs is not None:
            logprobs.extend(choice.logprobs or CompletionLogprobs([], [], [], []))
            choice.logprobs = logprobs
        return choice

    def _prompt(self, index: int) -> tuple[str, CompletionLogprobs | None]:
        """The text before an answer, and its log-probabilities: of the token and of `num_logprobs` more."""
        request, logprobs = self.requests[index // self._n], None
        text = self._decode(request.prompt_token_ids) if request.prompt is None else request.prompt
        scored = request.prompt_logprobs
        if self._num_logprobs is not None and scored is not None:  # an answer that was aborted has none
            first = with_text([(request.prompt_token_ids[0], 0.0, 1)], request.seqs[0].detokenizer.spelling)
            rows = [first, *(dict(list(row.items())[: 1 + self._num_logprobs]) for row in scored if row)]
            logprobs = completion_logprobs(rows, offsets_in(text, [next(iter(row.values())) for row in rows]))
            logprobs.token_logprobs[0] = logprobs.top_logprobs[0] = None  # it comes after nothing
        self._starts[index] = len(text)
        return text, logprobs


def offsets_in(prompt: str, tokens: list[TokenLogprob]) -> list[int]:
    """Where tokens begin in a prompt that they are the end of: what a tokenizer puts before a text has no place in it."""
    decoder, ends = getincrementaldecoder("utf-8")("replace"), [0]
    for i, token in enumerate(tokens, 1):
        ends.append(ends[-1] + len(decoder.decode(token.token_bytes or b"", i == len(tokens))))
    return [max(0, len(prompt) - ends[-1] + at) for at in ends[:-1]]
