"""What single tokens say: their bytes, and the text of these."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property, partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte that has no piece
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Spelling:
    """The text and the bytes of each token, as it stands behind others; a token is read when it is first asked for.

    A token may be a part of a character: its bytes are its own, and its text has replacement characters.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._tokenizer, self._backend = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
        self._known: dict[int, tuple[str, bytes]] = {}

    def __getitem__(self, token_id: int) -> tuple[str, bytes]:
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> tuple[str, bytes]:
        text = self._decode([token_id])
        if REPLACEMENT in text:
            said = self._bytes(token_id) or text.encode()
            return said.decode(errors="replace"), said
        behind = self._decode([token_id, token_id])[len(text) :]  # the first token of a text may lose its space
        return behind, behind.encode()

    def _bytes(self, token_id: int) -> bytes:
        """The bytes that a token's name stands for; none if they are not known."""
        if self._backend is None:
            name = self._tokenizer.convert_ids_to_tokens(token_id)
        else:
            name = self._backend.id_to_token(token_id)
        if byte := BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        letters = self._letters(name)
        return bytes(self._alphabet[letter] for letter in letters) if self._alphabet.keys() >= set(letters) else b""

    def _letters(self, name: str) -> str:
        """A token's name as it comes to the decoder's step that makes bytes of letters."""
        steps = list(takewhile(lambda step: step["type"] != "ByteLevel", self._steps))
        if not steps:
            return name
        from tokenizers.decoders import Sequence

        before = Sequence([])
        before.__setstate__(json.dumps({"type": "Sequence", "decoders": steps}).encode())
        return str(before.decode([name]))

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        """The steps of the tokenizer's decoder."""
        decoder = getattr(self._backend, "decoder", None)
        told: dict[str, Any] = {"decoders": []} if decoder is None else json.loads(decoder.__getstate__())
        steps: list[dict[str, Any]] = told.get("decoders", [told])
        return steps

    @cached_property
    def _alphabet(self) -> Mapping[str, int]:
        return byte_alphabet() if any(step["type"] == "ByteLevel" for step in self._steps) else {}


def byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in a byte-level vocabulary: printable ones for themselves (GPT-2's choice)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
