"""A tokenizer that is there before transformers is.

The library `tokenizers` does the work of most models' tokenizers; what transformers puts around it takes up to 6 s to be
imported. So texts are encoded and decoded without it. A chat template or a list of special tokens needs transformers' tokenizer,
which is loaded then.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from folovllm.files import reading

MODELS = ("llama", "qwen3")  # for which `AutoTokenizer` takes the class that the files name
CLASSES = {"PreTrainedTokenizerFast": "PreTrainedTokenizerFast", "TokenizersBackend": "PreTrainedTokenizerFast"}
CLASSES |= {"Qwen2Tokenizer": "Qwen2Tokenizer", "Qwen2TokenizerFast": "Qwen2Tokenizer"}
CHANGES = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "split_special_tokens",
    "auto_map",
    "fix_mistral_regex",
    "model_specific_special_tokens",
)
QWENS_OWN = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")  # where the files name none
QWENS_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class QuickTokenizer:
    """Encodes and decodes as transformers' tokenizer of these files, and is that tokenizer for all else.

    The `backend_tokenizer` is a copy of the one in there: neither sees what is changed at the other.
    """

    def __init__(self, where: Path, kind: str, eos_token: str | None) -> None:
        self.backend_tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
        self.eos_token_id = None if eos_token is None else self.backend_tokenizer.token_to_id(eos_token)
        self._where, self._kind = where, kind

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Other threads run meanwhile, which they do not while `Tokenizer.encode` does."""
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
    def whole(self) -> Any:
        """transformers' tokenizer. Its class is imported by name: `AutoTokenizer` may import models as well.

        Raises:
            ValueError: transformers cannot read the files. (An AttributeError would lead back to here, by `__getattr__`.)
        """
        import transformers

        with reading(f"the tokenizer in {self._where}"):
            return getattr(transformers, self._kind).from_pretrained(self._where)

    def __len__(self) -> int:
        return len(self.whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What transformers' tokenizer returns."""
        return self.whole(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole, name)


def whole(tokenizer: Any) -> Any:
    """transformers' tokenizer, for what must have the very object."""
    return tokenizer.whole if isinstance(tokenizer, QuickTokenizer) else tokenizer


def quick_tokenizer(where: Path, files: Mapping[str, dict[str, Any]]) -> QuickTokenizer | None:
    """The tokenizer in this folder, if transformers does just what `tokenizer.json` says; else None.

    Args:
        files: what the folder's files say that are there, by their names.
    """
    model, said, content = (files.get(name) for name in ("config.json", "tokenizer_config.json", "tokenizer.json"))
    if not (model and said and content) or "added_tokens.json" in files:
        return None
    kind = CLASSES.get(said.get("tokenizer_class") or "")
    if kind == "Qwen2Tokenizer":
        said = QWENS_OWN | said
    if model.get("model_type") not in MODELS or kind is None or any(said.get(name) for name in CHANGES):
        return None
    if "special_tokens_map.json" in files and "added_tokens_decoder" not in said:
        return None
    as_it_stands = said.get("clean_up_tokenization_spaces") is False and is_plain(content)
    if not (as_it_stands and knows_special_tokens(said, content) and (kind != "Qwen2Tokenizer" or is_qwens(content))):
        return None
    return QuickTokenizer(where, kind, text_of(said.get("eos_token")))


def is_plain(content: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json` encodes by byte pairs, and adds and cuts off nothing."""
    after = (content.get("post_processor") or {"type": "ByteLevel"})["type"]
    model = content["model"]["type"]
    return not content.get("truncation") and not content.get("padding") and (model, after) == ("BPE", "ByteLevel")


def knows_special_tokens(said: dict[str, Any], content: dict[str, Any]) -> bool:
    """Whether the special tokens that `tokenizer_config.json` names are just those of `tokenizer.json`."""
    added = {token["id"]: token for token in content["added_tokens"]}
    special = {token["content"] for token in added.values() if token["special"]}
    extra, listed = said.get("extra_special_tokens") or (), said.get("added_tokens_decoder")
    named = [*(said.get("additional_special_tokens") or ()), *(extra.values() if isinstance(extra, dict) else extra)]
    named += [said[name] for name in said if name.endswith("_token") and name not in CHANGES]
    return {*map(text_of, named)} <= {*special, None} and (
        listed is None or added == {int(id_): {"id": int(id_), **token} for id_, token in listed.items()}
    )


def is_qwens(content: dict[str, Any]) -> bool:
    """Whether a `tokenizer.json` is what transformers' `Qwen2Tokenizer` would make of its vocabulary and merges."""
    model, words = content["model"], content.get("pre_tokenizer") or {}
    split, as_bytes = (*words.get("pretokenizers", ()), {}, {})[:2]
    return (
        not any(model.get(name) for name in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"))
        and not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and content.get("normalizer") == {"type": "NFC"}
        and len(words.get("pretokenizers", ())) == 2
        and (split.get("pattern"), split.get("behavior"), split.get("invert")) == ({"Regex": QWENS_WORDS}, "Isolated", False)
        and (as_bytes.get("type"), as_bytes.get("add_prefix_space"), as_bytes.get("use_regex")) == ("ByteLevel", False, False)
        and (content.get("decoder") or {}).get("type") == "ByteLevel"
    )  # fmt: skip


def text_of(token: str | dict[str, Any] | None) -> str | None:
    """A special token, as a configuration names it."""
    return token["content"] if isinstance(token, dict) else token
