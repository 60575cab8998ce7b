"""Which bytes each token of a tokenizer stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from folovllm.engine.spelling import BYTE, byte_alphabet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True, frozen=True)
class Vocabulary:
    """The tokens of a tokenizer as bytes, both ways."""

    bytes_of: Mapping[int, bytes]  # of every token, by its id; of a special one, its name
    ids_of: Mapping[bytes, Sequence[int]]  # by what a token stands for; special ones stand for nothing
    longest: int  # bytes that any token stands for


def read_vocabulary(tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """Read all tokens. Raises ValueError if the tokenizer writes bytes in a way that is not known here."""
    read = _reader(tokenizer)
    added = {id_: token.content.encode() for id_, token in tokenizer.added_tokens_decoder.items()}
    special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    ordinary = {id_: read(token) for token, id_ in tokenizer.get_vocab().items() if id_ not in added}
    bytes_of = dict(sorted((ordinary | added).items()))
    ids_of: dict[bytes, list[int]] = {}
    for id_, text in bytes_of.items():
        if text and id_ not in special:
            ids_of.setdefault(text, []).append(id_)
    return Vocabulary(bytes_of, ids_of, max(map(len, ids_of), default=0))


def _reader(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], bytes]:
    """From the name of an ordinary token to its bytes."""
    decoder = str(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", ""))
    if "ByteLevel" in decoder:
        byte_of = byte_alphabet()
        # As the decoder does it: a token with a letter that stands for no byte stands for its own name, all of it.
        return lambda token: bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= {*token} else token.encode()
    if "▁" in decoder:
        return _read_sentencepiece
    raise ValueError(
        "structured_outputs needs a tokenizer whose tokens stand for bytes: byte-level, or SentencePiece's"
    )


def _read_sentencepiece(token: str) -> bytes:
    if byte := BYTE.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("▁", " ").encode()
