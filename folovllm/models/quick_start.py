"""The embedded models' configurations and tokenizers without transformers, which needs up to 6 s to be imported."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # transformers' name of its warning


class PlainConfig(SimpleNamespace):
    """The fields that the engine reads of a `PretrainedConfig`, under the same names."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class QuickTokenizer:
    """Encodes and decodes by the library `tokenizers`, as transformers' tokenizer does, and is that tokenizer for all else."""

    def __init__(self, where: Path, eos_token: str) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
        self.eos_token_id = self.backend_tokenizer.token_to_id(eos_token)
        self._where = where

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. A batch, since other threads run meanwhile, as they do not beside `Tokenizer.encode`."""
        (encoding,) = self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(
        self, token_ids: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """The text of token ids. Spaces stay as they are."""
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def full(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(self._where)
        tokenizer.deprecation_warnings[TOO_LONG] = True  # our own sentence says it, once
        return tokenizer

    def __len__(self) -> int:
        return len(self.full)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.full(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.full, name)
