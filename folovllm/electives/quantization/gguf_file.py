"""A GGUF file of a Llama model as a folder in Hugging Face format, so that nothing else in FoloVLLM knows of GGUF."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from folovllm.models.files import reading
from folovllm.models.written_files import cache_dir

if TYPE_CHECKING:
    import torch
    from gguf.gguf_reader import ReaderTensor

    Tensors = dict[str, ReaderTensor]

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_SPECIAL = 3  # GGUF's token type "control"
_ROPE, _THETA = "rope_freqs.weight", 10_000.0
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of all Llama 3 models
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # special tokens: ours, GGUF's
_TOKENS = "tokenizer.ggml."
_NEEDED = (
    *(f"llama.{name}" for name in _SIZES),
    "llama.attention.layer_norm_rms_epsilon",
    f"{_TOKENS}tokens",
    f"{_TOKENS}merges",
)


def gguf_dir(file: Path) -> Path:
    """Return the folder of a GGUF file with quantized weights: made when it is first asked for, and kept in the cache.

    Raises:
        ValueError: the file is none, or of a model whose configuration or tokenizer is not known here; or the folder cannot
            be written. Nothing is left behind then.
    """
    about = file.stat()
    target = cache_dir() / "gguf" / f"{file.stem}-{about.st_size:x}-{about.st_mtime_ns:x}"
    if not is_complete(target):
        with becoming(target, f"cannot convert {file} into {target.parent}") as work:
            convert(file, work / "model", in_codes=True)
    return target


@contextmanager
def becoming(target: Path, failure: str, hint: str = "") -> Iterator[Path]:
    """Give a folder to work in, whose `model` is renamed to `target` at the end of the block; so `target` is always complete.

    Raises:
        ValueError: `failure`, why, and `hint`: the disk did not take it. Nothing is left behind.
    """
    from safetensors import SafetensorError

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as work:
            yield Path(work)
            publish(Path(work, "model"), target)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{failure}: {error}. {hint}FOLOVLLM_CACHE names another folder") from error


def is_complete(folder: Path) -> bool:
    """Return whether this is a converted model. An empty folder, made by hand or by a container's mount, is none."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _sweep(folder: Path) -> None:
    """Remove what a killed process left behind; a day is longer than one that may still be running."""
    for work in folder.glob(".smollm2-*"):
        if work.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(work, ignore_errors=True)


def publish(finished: Path, target: Path) -> None:
    """Rename `finished` to `target`. Another process that was quicker wins: both folders are the same."""
    try:
        finished.rename(target)  # an empty folder gives way
    except OSError:
        if not is_complete(target):
            raise


def convert(gguf_file: Path, out: Path, in_codes: bool = False) -> None:
    """Write the GGUF file of a Llama model as config, safetensors (bfloat16), tokenizer and chat template to `out`.

    With `in_codes` the projections stay quantized, if `gguf_codes` has their type. All of the file is read before anything is written.
    """
    from folovllm.electives.quantization.gguf_codes import coded_weights
    from folovllm.electives.quantization.gguf_reader import read_gguf

    meta, theirs = read_gguf(gguf_file)
    with reading(gguf_file):
        _check_known(gguf_file, meta)
        config = _config(meta) | _rope(meta, theirs.pop(_ROPE, None))
        tensors = {_hf_name(name): tensor for name, tensor in theirs.items()}
        tokenizer, of_tokenizer = _build_tokenizer(meta).to_str(pretty=True), _tokenizer_config(meta)
    coded, said = coded_weights(gguf_file, tensors, partial(_rows, config)) if in_codes else ({}, {})
    types = said.get("quantization_config", {}).get("types", {})
    floats = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in types}
    weights = coded | _weights(gguf_file, floats, config)
    config |= _biases(weights, config) | {"tie_word_embeddings": "lm_head.weight" not in tensors} | said
    small = {"config.json": config, "generation_config.json": _special_ids(meta), "tokenizer_config.json": of_tokenizer}
    _write(out, tokenizer, small, weights)


def _write(out: Path, tokenizer: str, small: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    """Make the folder: the tokenizer's text, the `small` JSON files by their names, and the weights."""
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    for name, content in small.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(out / "config.json", out / "model.safetensors")  # save_file lets nobody else read it


def _check_known(gguf_file: Path, meta: dict[str, Any]) -> None:
    """Raise ValueError unless this is a Llama model with a tokenizer as SmolLM2's is, and all that it takes is there."""
    family, tokenizer = meta.get("general.architecture"), meta.get("tokenizer.ggml.pre", "smollm")
    if family != "llama" or tokenizer != "smollm" or meta.get("tokenizer.ggml.model") != "gpt2":
        raise ValueError(
            f"{gguf_file} holds a model of architecture {family!r} with tokenizer {tokenizer!r}: of GGUF files those of "
            "architecture 'llama' with tokenizer 'smollm' are supported. Take the model's safetensors"
        )
    if absent := [key for key in _NEEDED if key not in meta]:
        raise ValueError(f"it lacks {', '.join(absent)}")
    for key in (f"llama.{name}" for name in _SIZES):
        if not (isinstance(meta[key], int) and 0 < meta[key] < 2**31):
            raise ValueError(f"{key} is {meta[key]!r}, and must be a whole number of at least 1")


def _weights(gguf_file: Path, tensors: Tensors, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors, dequantized."""
    import torch
    from tqdm import tqdm

    weights = {}
    for name, tensor in tqdm(tensors.items(), desc="Converting", unit=" tensors"):
        with reading(gguf_file, name):
            weights[name] = _rows(config, name, _floats(tensor)).to(torch.bfloat16).contiguous()
    return weights


def _floats(tensor: ReaderTensor) -> torch.Tensor:
    """Return a tensor in float32. Raises ValueError if it is of a type that cannot be unpacked."""
    import torch
    from gguf import dequantize

    try:
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        raise ValueError(f"tensors of type {tensor.tensor_type.name} are not supported") from error


def _rows(config: dict[str, Any], name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of a weight, of a bias, or of codes or scales, in Hugging Face's order."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    leaf = name.split(".")[-2]
    return _split_halves(weight, heads[leaf]) if leaf in heads else weight


def _split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k, `[num_heads * D, H]`, or of their biases, `[num_heads * D]`.

    RoPE turns pairs of a head's dimensions. llama.cpp stores each pair's two rows side by side (0, 1), (2, 3), ...;
    Hugging Face's code pairs row i with row i + D/2. The wrong order still gives fluent nonsense, not an error.
    """
    return weight.view(num_heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ValueError for a tensor that no Llama has here."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", layer, part, "weight" | "bias" as kind] if layer.isdecimal() and part in BLOCK_NAMES:
            return f"model.layers.{layer}.{BLOCK_NAMES[part]}.{kind}"
    raise ValueError(f"it holds a tensor {name}, for which the model has no place")


def _biases(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, bool]:
    """Return the configuration's fields about biases. Where some projections have a bias, the others get one of zeros."""
    import torch

    from folovllm.models.shapes import linear_shapes

    said = {"attention_bias": "self_attn.", "mlp_bias": "mlp."}
    has_bias = {
        field: any(name.endswith("proj.bias") and block in name for name in weights) for field, block in said.items()
    }
    for name, (outputs, _) in linear_shapes(SimpleNamespace(**config)).items():
        if has_bias["attention_bias" if name.startswith("self_attn.") else "mlp_bias"]:
            for i in range(config["num_hidden_layers"]):
                weights.setdefault(f"model.layers.{i}.{name}.bias", torch.zeros(outputs, dtype=torch.bfloat16))
    return has_bias


def _special_ids(meta: dict[str, Any]) -> dict[str, int | None]:
    return {f"{name}_token_id": meta.get(f"{_TOKENS}{_IDS[name]}_token_id") for name in ("bos", "eos", "pad")}


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration, under the names that transformers has for GGUF's."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    named = {ours: meta.get(f"llama.{theirs}") for theirs, ours in GGUF_CONFIG_MAPPING["llama"].items() if ours}
    given = {name: value for name, value in named.items() if value is not None}
    defaults = {"num_key_value_heads": named["num_attention_heads"], "rope_theta": _THETA}
    said = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "head_dim": head_dim_of(meta),
        "vocab_size": len(meta[f"{_TOKENS}tokens"]), "rms_norm_eps": round(given["rms_norm_eps"], 9),  # was rounded to float32
    }  # fmt: skip
    return defaults | given | said | _special_ids(meta)


def _rope(meta: dict[str, Any], factors: ReaderTensor | None) -> dict[str, Any]:
    """Return the configuration's field about scaled angles, if they are scaled."""
    found = None if factors is None else _floats(factors)
    if found is not None and found.shape != (head_dim_of(meta) // 2,):
        raise ValueError(f"{_ROPE} has shape {list(found.shape)}, and must have one factor for each pair of a head")
    scaling = _rope_scaling(meta, found, meta.get("llama.rope.freq_base", _THETA))
    return {"rope_scaling": scaling} if scaling else {}


def _rope_scaling(meta: dict[str, Any], factors: torch.Tensor | None, theta: float) -> dict[str, Any]:
    """Return the `rope_scaling` of a Hugging Face configuration; empty where angles are not scaled.

    llama.cpp writes linear scaling and YaRN as values. Llama 3's scaling becomes a tensor, `rope_freqs.weight`: the divisor of each
    frequency (`generate_extra_tensors` in its `convert_hf_to_gguf.py`). Hugging Face's code computes these from four numbers.

    Args:
        meta: the file's values.
        factors: its `rope_freqs.weight` [D/2], if there is one.

    Raises:
        ValueError: the scaling is of a kind that is not supported, or lacks a number.
    """
    kind = meta.get("llama.rope.scaling.type", "none")
    said = {} if factors is None else _scaling_by(factors, theta)
    if kind == "none":
        return said
    if said or kind not in ("linear", "yarn"):
        raise ValueError(
            f"llama.rope.scaling.type {kind!r}{' with rope_freqs.weight' if said else ''} is not supported"
        )
    said = {"rope_type": kind, "factor": meta["llama.rope.scaling.factor"]}
    if kind == "yarn":
        said["original_max_position_embeddings"] = meta["llama.rope.scaling.original_context_length"]
    return said


def _scaling_by(factors: torch.Tensor, theta: float) -> dict[str, Any]:
    """Return the `rope_scaling` that divides frequencies by `factors` [D/2]. Raises ValueError if there is none.

    A factor between 1 and the largest one gives the number of turns of its pair in the first training's context, and so the
    length of that context. Without such a factor it is the shortest that the last unscaled pair allows.
    """
    import torch

    from folovllm.layers.rope_scaling import scale_llama3

    largest = float(factors.max())
    if (factors == largest).all():
        return {} if largest == 1 else {"rope_type": "linear", "factor": largest}
    frequencies = theta ** (-torch.arange(len(factors)) / len(factors))
    kept = (1 / factors - 1 / largest) / (1 - 1 / largest)  # 1: as it was; 0: divided by the largest
    contexts = 2 * math.pi * (_LOW + kept * (_HIGH - _LOW)) / frequencies
    between = contexts[(kept > 1e-4) & (kept < 1 - 1e-4)]
    context = round(float(between[0])) if len(between) else math.ceil(float(contexts[kept > 0.5].max()))
    said = {
        "rope_type": "llama3", "factor": largest, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
        "original_max_position_embeddings": context,
    }  # fmt: skip
    if not torch.allclose(frequencies / scale_llama3(frequencies, said, context), factors, rtol=1e-3):
        raise ValueError("rope_freqs.weight scales in another way than Llama 3 does, which is not supported")
    return said


def head_dim_of(meta: dict[str, Any]) -> int:
    """Return D. Raises ValueError if only a part of a head is rotated."""
    size = int(
        meta.get("llama.attention.key_length", meta["llama.embedding_length"] // meta["llama.attention.head_count"])
    )
    if (rotated := meta.get("llama.rope.dimension_count", size)) != size:
        raise ValueError(f"llama.rope.dimension_count is {rotated}, and only whole heads, of {size}, are supported")
    return size


def _build_tokenizer(meta: dict[str, Any]) -> Any:
    """Return the byte-level BPE of GGUF's "smollm" pre-tokenizer: every digit is a word of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta[f"{_TOKENS}tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta[f"{_TOKENS}merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta.get(f"{_TOKENS}token_type", [0] * len(tokens))
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer's configuration. A base model has no chat template, and special tokens may be absent."""
    tokens = meta[f"{_TOKENS}tokens"]
    ids = {ours: meta.get(f"{_TOKENS}{theirs}_token_id") for ours, theirs in _IDS.items()}
    template = meta.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **({} if template is None else {"chat_template": template}),
        **{f"{name}_token": tokens[id_] for name, id_ in ids.items() if id_ is not None},
    }
