"""Token ids to text by `tokenizers.DecodeStream`: what `IncrementalDetokenizer` does, in the tokenizer's own language."""

from __future__ import annotations

from functools import cached_property
from io import StringIO
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from folovllm.engine.detokenizer import IncrementalDetokenizer, decoder, make_detokenizer
from folovllm.models.quick_start import QuickTokenizer
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase


MOST_HELD = 64  # tokens that wait for the end of a character
LONGEST = 4  # bytes of a character, so the tokens of one are no more


class StreamDetokenizer(IncrementalDetokenizer):
    """An `IncrementalDetokenizer` that decodes outside Python and whose text grows in place.

    A token costs the same at any length. `DecodeStream` moves the same window by the same rule, but gives up where the text
    of the window changes as it grows (bytes that are no character, for some tokenizers): there the inherited `advance`
    takes over, and a new stream goes on from its marks as soon as there is text.

    Bytes that never make a character would be held back to the end, and each decoded again with every token. Of more than
    `MOST_HELD` tokens what is final is shown.
    """

    def __init__(self, decode: Callable[[list[int]], str], backend: Any, skip_special_tokens: bool) -> None:
        super().__init__(decode)
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream: DecodeStream | None = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._num_streamed = 0  # tokens that were taken in

    def append(self, token_id: int) -> None:  # once a token: the base's marks are for log-probabilities alone
        if self.offsets is None:
            self.token_ids.append(token_id)
        else:
            super().append(token_id)

    def advance(self) -> str:
        new = self.token_ids[self._num_streamed :]
        if not new:
            return ""
        self._num_streamed = len(self.token_ids)
        delta = self._step(new)
        return self._advance_in_python() if delta is None else delta

    def _step(self, new: list[int]) -> str | None:
        """What the stream makes of new tokens; None if there is no stream, or it cannot follow, or too many are held back."""
        if self._stream is None:
            return None
        try:
            delta: str | None = self._stream.step(self._backend, new)
        except Exception as error:  # the binding knows no narrower class
            if not str(error).startswith("Invalid prefix"):
                raise
            return None
        if delta:
            self._context, self._shown = self._shown, len(self.token_ids)
            self._write(delta)
        return None if self._num_held > MOST_HELD else delta or ""

    def _advance_in_python(self) -> str:
        delta, self._stream = super().advance(), None
        if delta:
            self._stream = DecodeStream(self.token_ids[self._context :], self._skip_special_tokens)
        elif self._num_held > MOST_HELD:
            return self._show_final()
        return delta

    def _show_final(self) -> str:
        """Show the text up to a token behind which there are those of a character, and with which it reads the same.

        Tokens that are no text at all are dropped: special ones at once, for a character may go on behind them.
        """
        if self._skip_special_tokens:
            self.token_ids[self._shown :] = [i for i in self.token_ids[self._shown :] if i not in self._special]
            self._num_streamed = len(self.token_ids)
            if self._num_held <= MOST_HELD:
                return ""
        before, now = self._decoded(self._shown), self._decoded(len(self.token_ids))
        newest = len(self.token_ids) - LONGEST
        for end in range(newest, newest - LONGEST, -1):
            text = self._decoded(end)
            if text == before:
                del self.token_ids[self._shown : end]
                self._num_streamed = len(self.token_ids)
                return ""
            if now.startswith(text) and len(text) > len(before):
                self._context, self._shown = self._shown, end
                self._write(text[len(before) :])
                return text[len(before) :]
        return ""

    @cached_property
    def _special(self) -> set[int]:
        return {token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special}

    @property
    def _num_held(self) -> int:
        """Tokens whose text is not shown yet."""
        return len(self.token_ids) - self._shown

    def _decoded(self, end: int) -> str:
        return self._decode(self.token_ids[self._context : end])

    def _write(self, text: str) -> None:
        self._buffer.seek(0, 2)
        self._buffer.write(text)

    @property
    def text(self) -> str:
        """All of it, copied."""
        return self._buffer.getvalue()

    @text.setter
    def text(self, text: str) -> None:
        self._buffer = StringIO(newline="")
        self._buffer.write(text)

    @property
    def num_chars(self) -> int:
        return self._buffer.seek(0, 2)

    def read(self, start: int, end: int) -> str:
        """`text[start:end]`. The cost does not depend on the rest of the text."""
        self._buffer.seek(start)
        return self._buffer.read(max(0, end - start))

    def cut(self, end: int) -> None:
        self._buffer.truncate(end)


def make_stream_detokenizer(tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> IncrementalDetokenizer:
    """Make the detokenizer of one answer, which uses a `DecodeStream` if that decodes as the tokenizer does."""
    if decodes_by_itself(tokenizer):
        skip = params.skip_special_tokens
        return StreamDetokenizer(decoder(tokenizer, skip), tokenizer.backend_tokenizer, skip)
    return make_detokenizer(tokenizer, params)


def decodes_by_itself(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the `tokenizers` library alone makes the text: a fast backend without Python code of the model's around it."""
    if isinstance(tokenizer, QuickTokenizer):
        return True
    from transformers import PreTrainedTokenizerFast

    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    return issubclass(kind, fast) and kind.decode is fast.decode and kind._decode is fast._decode
