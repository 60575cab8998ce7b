"""From the name of a model to its files: a folder, its configuration, its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from folovllm.config import DEFAULT_MODEL, EngineConfig
from folovllm.files import in_one_line, reading
from folovllm.model_config import FULL
from folovllm.models.json_files import check_content, read_json
from folovllm.plugins import DOWNLOADS, FILE_FORMATS, MODELS, require
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSETS = Path(__file__).parent.parent / "assets"
BY_NAME = (
    "stories-5m",
    "stories-moe",
    "stories-hybrid",
    *DOWNLOADS,
)  # embedded or downloaded: the hub has none of them
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "config.json",
)

TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"  # transformers' name of its warning

# Which configurations and tokenizers are read without transformers.
PLAIN_KINDS = ("llama", "qwen3")  # for which `AutoTokenizer` takes the class that the files name
PLAIN_NEEDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
)  # fmt: skip
WITH_RULES = (
    "rope_scaling", "partial_rotary_factor", "sliding_window", "use_sliding_window", "quantization_config",
    "attention_dropout", "auto_map",
)  # fmt: skip
TOKENIZER_CLASSES = {
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
    "TokenizersBackend": "PreTrainedTokenizerFast",
}
TOKENIZER_CLASSES |= {"Qwen2Tokenizer": "Qwen2Tokenizer", "Qwen2TokenizerFast": "Qwen2Tokenizer"}
TOKENIZER_CHANGES = (
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


def resolve_model(name: str) -> Path:
    """Find the folder that holds a model: embedded, converted (from a GGUF file too), local, or from the Hugging Face hub.

    Raises:
        ValueError: there is no such folder and the hub cannot give it.
    """
    if not name:
        raise ValueError('a model has no name: give a folder, a hub id, or an embedded one, say "stories-5m"')
    if (ASSETS / name / "config.json").is_file():
        return ASSETS / name
    if name in DOWNLOADS:
        downloaded: Path = require(DOWNLOADS[name], f"the model {name}")(name)
        return downloaded
    path = Path(name).expanduser()
    if path.suffix in FILE_FORMATS and path.is_file():
        converted: Path = require(FILE_FORMATS[path.suffix], f"the model {path}")(path)
        return converted
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
        near = "".join(f" (did you mean {other!r}?)" for other in get_close_matches(name, BY_NAME, 1, 0.7))
        said = in_one_line(error)
        raise ValueError(
            f"no model folder at {name!r}{near}, and the Hugging Face hub did not give it: {said}"
        ) from error


def load_hf_config(path: Path, config: EngineConfig) -> Any:
    """The model's `PretrainedConfig`, or a `PlainConfig` with its fields.

    Raises:
        ValueError: it cannot be read, or is of no model that serves text.
    """
    with reading(f"the configuration in {path}"):
        fields = read_json(path / "config.json")
        check_heads(fields)
        if config.model_impl == "native" and (plain := plain_config(fields)) is not None:
            return plain
        from transformers import AutoConfig  # here, for that takes seconds

        hf_config = text_part(AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code))
        if absent := [name for name in NEEDED if getattr(hf_config, name, None) is None]:
            raise ValueError(f"config.json lacks {', '.join(absent)}: it is not the configuration of a decoder of text")
        check_content("config.json", hf_config.to_dict())  # a null may have taken the place of a default
    return hf_config


class PlainConfig(SimpleNamespace):
    """The fields that the engine reads of a `PretrainedConfig`, under the same names."""

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return dict(vars(self))


def plain_config(fields: dict[str, Any]) -> PlainConfig | None:
    """What the fields of a `config.json` say; None if it takes transformers to know that.

    transformers needs up to 6 s to be imported and to read such a file. It is asked wherever the file leaves something out, or
    something in it follows a rule that only transformers knows.
    """
    said = fields.get("rope_parameters") or {"rope_theta": fields.get("rope_theta")}
    rope = {"rope_type": "default", **said}
    all_full = [FULL] * (fields.get("num_hidden_layers") or 0)
    is_plain = (
        fields.get("model_type") in PLAIN_KINDS
        and all(fields.get(name) is not None for name in PLAIN_NEEDS)
        and not any(fields.get(name) for name in WITH_RULES)
        and (fields.get("layer_types") or all_full) == all_full
        and rope.keys() == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        and rope["rope_theta"] is not None
        and fields["hidden_size"] % fields["num_attention_heads"] == 0
        and ("eos_token_id" in fields or fields["model_type"] != "llama")  # a Llama's would be 2
    )
    return PlainConfig(**fields | {"rope_parameters": rope}) if is_plain else None


def text_part(hf_config: Any) -> Any:
    """The configuration of the part that writes text, of a model that reads images as well; else `hf_config`.

    Only for an elective's models: their classes say which tensors of such a checkpoint they leave out.
    """
    named_otherwise = [
        name.replace("ForConditionalGeneration", "ForCausalLM")
        for name in getattr(hf_config, "architectures", None) or []
    ]
    text = getattr(hf_config, "text_config", None)
    if text is None or MODELS.keys().isdisjoint(named_otherwise):
        return hf_config
    text.architectures = named_otherwise
    if (quantization := getattr(hf_config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def check_heads(fields: dict[str, Any]) -> None:
    """Raise ValueError if a `config.json` states query heads that its KV heads cannot share."""
    kv_heads = fields.get("num_key_value_heads") or 1
    heads = fields.get("num_attention_heads") or kv_heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")


def tokenizer_folder(path: Path) -> Path:
    """Where the tokenizer of a model folder is: there, but the embedded models have one for all."""
    return ASSETS / DEFAULT_MODEL if path.parent == ASSETS else path


def load_tokenizer(path: Path, config: EngineConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises ValueError where there is none."""
    where = tokenizer_folder(resolve_model(config.tokenizer) if config.tokenizer else path)
    if not any((where / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ValueError(f"{where} has no tokenizer (tokenizer.json): name one with tokenizer=...")
    with reading(f"the tokenizer in {where}"):
        files = {name: read_json(where / name) for name in TOKENIZER_FILES if (where / name).is_file()}
        if (quick := quick_tokenizer(where, files)) is not None:
            return quick
        from transformers import AutoTokenizer  # here, for that takes seconds

        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=config.trust_remote_code)
        tokenizer.deprecation_warnings[TOO_LONG] = True  # as if it had been said: our own sentence says it, once
        return tokenizer


class QuickTokenizer:
    """Encodes and decodes as transformers' tokenizer of these files, and is that tokenizer for all else.

    The library `tokenizers` does the work of most models' tokenizers; what transformers puts around it takes up to 6 s to be
    imported. A chat template or a list of special tokens needs transformers' tokenizer, which is loaded then.

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
    kind = TOKENIZER_CLASSES.get(said.get("tokenizer_class") or "")
    if kind == "Qwen2Tokenizer":
        said = QWENS_OWN | said
    if model.get("model_type") not in PLAIN_KINDS or kind is None or any(said.get(name) for name in TOKENIZER_CHANGES):
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
    named += [said[name] for name in said if name.endswith("_token") and name not in TOKENIZER_CHANGES]
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


def generation_defaults(path: Path) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that the model recommends. Anything else that it recommends is left out."""
    file = path / "generation_config.json"
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    names["max_new_tokens"] = "max_tokens"
    with reading(file):
        said = read_json(file) if file.is_file() else {}
        found = {ours: said[theirs] for theirs, ours in names.items() if said.get(theirs) is not None}
        SamplingParams(**found)
    return found


def eos_token_ids(path: Path, hf_config: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All ids that end a text: the generation config's, else the model config's, and the tokenizer's."""
    declared: Any = None
    if (path / "generation_config.json").is_file():
        with reading(f"generation_config.json in {path}"):
            declared = read_json(path / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = getattr(hf_config, "eos_token_id", None)
    ids = {declared} if isinstance(declared, int) else set(declared or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(id_ for id_ in ids if 0 <= id_ < hf_config.vocab_size)  # an id without a logit is never sampled
