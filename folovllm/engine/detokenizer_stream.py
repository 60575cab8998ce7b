"""Token ids to text by `tokenizers.DecodeStream`: what `IncrementalDetokenizer` does, in the tokenizer's own language."""

from __future__ import annotations

from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any

from tokenizers.decoders import DecodeStream

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.quick_tokenizer import QuickTokenizer
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase


class StreamDetokenizer(IncrementalDetokenizer):
    """An `IncrementalDetokenizer` that decodes outside Python and whose text grows in place.

    A token costs the same at any length. `DecodeStream` moves the same window by the same rule, but gives up where the text
    of the window changes as it grows (bytes that are no character, for some tokenizers): there the inherited `advance`
    takes over, and a new stream goes on from its marks.
    """

    def __init__(self, decode: Callable[[list[int]], str], backend: Any, skip_special_tokens: bool) -> None:
        super().__init__(decode)
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._num_streamed = 0  # tokens that the stream has seen

    def advance(self) -> str:
        """As inherited."""
        new = self.token_ids[self._num_streamed :]
        if not new:
            return ""
        self._num_streamed = len(self.token_ids)
        try:
            delta = self._stream.step(self._backend, new)
        except Exception as error:  # the binding knows no narrower class
            if not str(error).startswith("Invalid prefix"):
                raise
            return self._advance_in_python()
        if not delta:
            return ""
        self._context, self._shown = self._shown, len(self.token_ids)
        self._buffer.seek(0, 2)
        self._buffer.write(delta)
        return delta

    def _advance_in_python(self) -> str:
        delta = super().advance()
        self._stream = DecodeStream(self.token_ids[self._context :], self._skip_special_tokens)
        return delta

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
        """Length of the text."""
        return self._buffer.seek(0, 2)

    def read(self, start: int, end: int) -> str:
        """`text[start:end]`. The cost does not depend on the rest of the text."""
        self._buffer.seek(start)
        return self._buffer.read(max(0, end - start))

    def cut(self, end: int) -> None:
        """Remove the text from the character `end` on."""
        self._buffer.truncate(end)


class NoText(IncrementalDetokenizer):
    """For a request that wants no text."""

    def __init__(self) -> None:
        super().__init__(lambda _: "")

    def append(self, token_id: int) -> None:
        """Nothing is kept."""


def make_detokenizer(
    tokenizer: PreTrainedTokenizerBase, params: SamplingParams, stream: bool
) -> IncrementalDetokenizer:
    """Make the detokenizer of one answer. With `stream` it uses a `DecodeStream`, if that decodes as the tokenizer does."""
    if not params.detokenize:
        return NoText()
    skip = params.skip_special_tokens
    decode = partial(tokenizer.decode, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    if stream and decodes_by_itself(tokenizer):
        return StreamDetokenizer(decode, tokenizer.backend_tokenizer, skip)
    return IncrementalDetokenizer(decode)


def decodes_by_itself(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the `tokenizers` library alone makes the text: a fast backend without Python code of the model's around it."""
    if isinstance(tokenizer, QuickTokenizer):
        return True
    from transformers import PreTrainedTokenizerFast

    kind, fast = type(tokenizer), PreTrainedTokenizerFast
    return issubclass(kind, fast) and kind.decode is fast.decode and kind._decode is fast._decode
