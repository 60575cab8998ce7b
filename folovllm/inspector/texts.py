"""What token ids look like: the text of each piece of a vocabulary, or its bytes where it is no whole character."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from folovllm.spelling import BYTE, byte_alphabet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = str | list[int]


class TokenTexts:
    """The pieces of a tokenizer's vocabulary. They are read once: a tokenizer is not for two threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = set(tokenizer.all_special_tokens)
        self._pieces = {id_: (piece, piece in special) for piece, id_ in tokenizer.get_vocab().items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes = byte_alphabet() if backend is not None and "ByteLevel" in repr(backend.decoder) else {}

    def of(self, token_ids: Iterable[int]) -> dict[str, Text]:
        """A text for each id that has one."""
        found = {str(id_): self._text(*self._pieces[id_]) for id_ in sorted(token_ids) if id_ in self._pieces}
        return found

    def _text(self, piece: str, is_special: bool) -> Text:
        if is_special:
            return piece
        if self._bytes and all(letter in self._bytes for letter in piece):
            data = bytes(self._bytes[letter] for letter in piece)
        elif match := BYTE.fullmatch(piece):
            data = bytes([int(match[1], 16)])
        else:
            return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")  # SentencePiece's space
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)
