"""Token ids to text, a token at a time, never showing half a character."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from folovllm.engine.spelling import Spelling
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what decoders show for bytes that are no character (yet)


class IncrementalDetokenizer:
    """The text of one growing answer.

    A token's text depends on its neighbours (a space that joins, bytes that make up one character), so a token cannot
    be decoded alone; and to decode all of them at each step would be quadratic. A short window is enough:

        token_ids:  in `text`  | in `text`, decoded again as context  | new, not in `text`
                               `_context` (vLLM: prefix_offset)       `_shown` (read_offset)

    Invariant: `_context <= _shown <= len(token_ids)`; until a stop string cuts it, `text` holds all tokens before `_shown`.

    Attributes:
        spelling: of single tokens, for log-probabilities; None for a request that wants no text.
        offsets: for each token the number of characters before it; None unless X1's server wants it, with logprobs.
    """

    spelling: Spelling | None = None
    offsets: list[int] | None = None

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self._decode = decode  # the tokenizer's, for a list of ids
        self._context = 0
        self._shown = 0
        self._searched = 0  # characters in which no stop string begins

    def append(self, token_id: int) -> None:
        """Add a token; its text is decoded when it is asked for, or for `offsets` when the next one comes."""
        if self.offsets is not None:
            self.advance()
            self.offsets.append(self.num_chars)
        self.token_ids.append(token_id)

    def advance(self) -> str:
        """Decode what was appended and return the text it adds; "" while a character is incomplete.

        The window from `_context` is decoded twice: up to `_shown`, and to the end. If the longer text ends in a
        replacement character the last bytes are not a whole character yet: nothing moves. Else what the longer text
        has beyond the shorter one is new, `_context` moves to the old `_shown`, and `_shown` to the end. It may be called
        again with no token appended: that returns "" and must not move the window, or its context would be lost.
        """
        before = self._decode(self.token_ids[self._context : self._shown])
        after = self._decode(self.token_ids[self._context :])
        if len(after) <= len(before) or after.endswith(_REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self.token_ids)
        delta = after[len(before) :]
        self.text += delta
        return delta

    def flush(self) -> str:
        """At the end of an answer: decode what is left, incomplete characters as replacement characters."""
        self.advance()
        before = self._decode(self.token_ids[self._context : self._shown])
        rest = self._decode(self.token_ids[self._context :])[len(before) :]
        self._context = self._shown = len(self.token_ids)
        self.text += rest
        return rest

    def forget_last(self) -> None:
        """Remove the newest token. Call it before anything is decoded after that token came."""
        del self.token_ids[-1:]

    def find_stop(self, stop: list[str], include: bool = False) -> str | None:
        """Find the stop string that occurs first, and cut the text before (or, with `include`, after) it."""
        self.advance()
        unsearched = self.read(self._searched, self.num_chars)
        hits = [(at, s) for s in stop if (at := unsearched.find(s)) >= 0]
        if not hits:
            self._searched = max(self._searched, self.num_chars - max(map(len, stop)) + 1)
            return None
        at, found = min(hits)
        self.cut(self._searched + at + (len(found) if include else 0))
        self._context = self._shown = len(self.token_ids)  # nothing comes after the cut
        return found

    def skip_search(self) -> None:
        """Never find a stop string that begins in the text so far."""
        self.advance()
        self._searched = self.num_chars

    @property
    def num_chars(self) -> int:
        """Length of the text."""
        return len(self.text)

    def read(self, start: int, end: int) -> str:
        """`text[start:end]`."""
        return self.text[start:end]

    def cut(self, end: int) -> None:
        """Remove the text from the character `end` on."""
        self.text = self.text[:end]


def make_detokenizer(tokenizer: PreTrainedTokenizerBase, params: SamplingParams) -> IncrementalDetokenizer:
    """Make the detokenizer of one answer."""
    return IncrementalDetokenizer(decoder(tokenizer, params.skip_special_tokens))


def decoder(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return what makes the text of a list of token ids."""
    return partial(tokenizer.decode, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
