"""From the name of a model to its files: a folder, its configuration, its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from folovllm.config import EngineConfig

ASSETS = Path(__file__).parent.parent / "assets"
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip


def resolve_model(name: str) -> Path:
    """The folder that holds a model: embedded, converted, local, or fetched from the Hugging Face hub.

    Raises:
        ValueError: there is no such folder and the hub cannot give it.
    """
    if (ASSETS / name / "config.json").is_file():
        return ASSETS / name
    if name == "smollm2":
        from folovllm.models.smollm2 import smollm2_dir

        return smollm2_dir()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json: it is not a model in Hugging Face format")
        return path
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    """Download (or find in the hub's cache) the safetensors, configuration and tokenizer of a hub id."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except HFValidationError as error:
        raise ValueError(f"no model folder at {name!r}, and it is not a hub id such as Qwen/Qwen3-0.6B") from error
    except Exception as error:  # offline, unknown, gated: the hub's own sentence says which
        raise ValueError(f"no model folder at {name!r}, and the Hugging Face hub did not give it: {error}") from error


def load_hf_config(path: Path, config: EngineConfig) -> Any:
    """The model's `PretrainedConfig`. Raises ValueError where it cannot be read."""
    try:
        check_sizes(json.loads((path / "config.json").read_text(encoding="utf-8")))
        return AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"cannot read the configuration in {path}: {error}") from error


def check_sizes(fields: dict[str, Any]) -> None:
    """Raise ValueError if a `config.json` states a size below 1, or query heads that its KV heads cannot share."""
    sizes = {name: fields[name] for name in SIZES if isinstance(fields.get(name), int)}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}, and must be at least 1")
    kv_heads = sizes.get("num_key_value_heads", 1)
    heads = sizes.get("num_attention_heads", kv_heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")


def load_tokenizer(path: Path, config: EngineConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises ValueError where there is none."""
    where = resolve_model(config.tokenizer) if config.tokenizer else path
    if not any((where / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"{where} has no tokenizer (tokenizer.json): name one with tokenizer=...")
    try:
        return AutoTokenizer.from_pretrained(where, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"cannot read the tokenizer in {where}: {error}") from error


def load_generation_config(path: Path) -> GenerationConfig | None:
    """The model's recommendations for generating text, if it brings any. Raises ValueError where they cannot be read."""
    if not (path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read generation_config.json in {path}: {error}") from error


def generation_defaults(path: Path) -> dict[str, Any]:
    """The fields of `SamplingParams` that the model recommends; of what else it says we know nothing."""
    config = load_generation_config(path)
    said = config.to_diff_dict() if config is not None else {}
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    names["max_new_tokens"] = "max_tokens"
    return {ours: said[theirs] for theirs, ours in names.items() if said.get(theirs) is not None}


def eos_token_ids(path: Path, hf_config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that end a text: the generation config's, else the model config's, and the tokenizer's."""
    config = load_generation_config(path)
    declared: Any = None if config is None else config.eos_token_id
    if declared is None:
        declared = getattr(hf_config, "eos_token_id", None)
    ids = {declared} if isinstance(declared, int) else set(declared or ())
    if not all(isinstance(id_, int) for id_ in ids):
        raise ValueError(f"eos_token_id in {path} must be a token id or a list of them, not {declared!r}")
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(id_ for id_ in ids if 0 <= id_ < hf_config.vocab_size)  # what has no logit is never drawn
