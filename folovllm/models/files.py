"""From the name of a model to its files: a folder, its configuration, its tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from folovllm.config import DEFAULT_MODEL, EngineConfig
from folovllm.models.messages import in_one_line, printable
from folovllm.models.model_config import UnsupportedModel
from folovllm.models.quick_start import TOO_LONG, PlainConfig, QuickTokenizer
from folovllm.plugins import DOWNLOADS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSETS = Path(__file__).parent.parent / "assets"


class UnreadableFile(ValueError):
    """A user's file is at fault. The sentence names the file or its folder."""


# An unwritten exercise or a full device is not the file's fault; an `UnreadableFile` has its sentence already.
NOT_THE_FILE = (UnreadableFile, UnsupportedModel, NotImplementedError, torch.OutOfMemoryError)
NOT_THE_FILE += (KeyboardInterrupt, SystemExit, GeneratorExit)  # type: ignore[assignment]


@contextmanager
def reading(what: object, key: str = "") -> Iterator[None]:
    """Turn what a library raises while a user's file is read into an `UnreadableFile`, one sentence with its name.

    `what`: the file, or what is read from it. `key`: the field or tensor that is read, for messages that do not name it.
    """
    try:
        yield
    except NOT_THE_FILE:
        raise
    except BaseException as error:  # a panic in a library's Rust is no Exception
        message = in_one_line(error)
        field = "" if key in message else f"{printable(key, 100)}: "
        raise UnreadableFile(f"cannot read {what}: {field}{message}") from error


def resolve_model(name: str) -> Path:
    """Find the folder that holds a model: embedded, local, or what `sources.fetch` returns. Raises ValueError if there is none."""
    if not name:
        raise ValueError('a model has no name: give a folder, a hub id, or an embedded one, say "stories-5m"')
    if os.path.isfile(ASSETS / name / "config.json"):  # `Path.is_file` raises for a name that is too long
        return ASSETS / name
    path = Path(os.path.expanduser(name))
    if not os.path.isdir(path) or name in DOWNLOADS:
        from folovllm.models.sources import fetch

        return fetch(name)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json: it is not a model in Hugging Face format")
    return path


def load_hf_config(path: Path, config: EngineConfig) -> Any:
    """The model's `PretrainedConfig`, or a `PlainConfig`. Raises ValueError if it cannot be read, or is of no model that serves text."""
    with reading(f"the configuration in {path}"):
        fields = read_json(path / "config.json")
        if path.parent != ASSETS:
            from folovllm.models.checked_config import checked_config  # here, for the embedded ones are in order

            return checked_config(path, fields, config.trust_remote_code)
        if config.model_impl == "native" and fields["model_type"] == "qwen3":
            return PlainConfig(**fields)
        from transformers import AutoConfig  # here, for that takes seconds

        return AutoConfig.from_pretrained(path)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, which names the file, if it holds none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file.name} must hold an object {{...}}")
    return content


def tokenizer_folder(path: Path) -> Path:
    """Where the tokenizer of a model folder is: there, but the embedded models have one for all."""
    return ASSETS / DEFAULT_MODEL if path.parent == ASSETS else path


def load_tokenizer(path: Path, config: EngineConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises ValueError where there is none."""
    where = tokenizer_folder(resolve_model(config.tokenizer) if config.tokenizer else path)
    if not any((where / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"{where} has no tokenizer (tokenizer.json): name one with tokenizer=...")
    with reading(f"the tokenizer in {where}"):
        if where == ASSETS / DEFAULT_MODEL:
            return QuickTokenizer(where, read_json(where / "tokenizer_config.json")["eos_token"])
        from transformers import AutoTokenizer  # here, for that takes seconds

        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=config.trust_remote_code)
        tokenizer.deprecation_warnings[TOO_LONG] = True  # our own sentence says it, once
        return tokenizer


def full_tokenizer(tokenizer: Any) -> Any:
    """transformers' tokenizer, for what must have the very object."""
    return tokenizer.full if isinstance(tokenizer, QuickTokenizer) else tokenizer


def eos_token_ids(path: Path, hf_config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return all ids in the vocabulary that end a text: the generation config's, else the model config's, and the tokenizer's."""
    with reading(f"the ids that end a text in {path}"):
        file = path / "generation_config.json"
        declared = (read_json(file) if file.is_file() else {}).get("eos_token_id")
        if declared is None:
            declared = getattr(hf_config, "eos_token_id", None)
        ids = {declared} if isinstance(declared, int) else set(declared or ())
        if tokenizer.eos_token_id is not None:
            ids.add(tokenizer.eos_token_id)
        return frozenset(id_ for id_ in ids if 0 <= id_ < hf_config.vocab_size)  # others are never sampled
