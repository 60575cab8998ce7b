"""A GGUF file of a Llama model as a folder in Hugging Face format, so that nothing else in FoloVLLM knows of GGUF."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from folovllm.files import cache_dir

if TYPE_CHECKING:
    import torch

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


def gguf_dir(file: Path) -> Path:
    """The folder of a GGUF file in codes: made when it is first asked for, kept in the cache.

    Raises:
        ValueError: the file is none, or of a model whose configuration or tokenizer is not known here; or the folder cannot
            be written. Nothing is left behind then.
    """
    about = file.stat()
    target = cache_dir() / "gguf" / f"{file.stem}-{about.st_size:x}-{about.st_mtime_ns:x}"
    if not is_complete(target):
        with becoming(target, f"cannot convert {file} into {target.parent}") as work:
            convert_in_codes(file, work / "model")
    return target


@contextmanager
def becoming(target: Path, failure: str, hint: str = "") -> Iterator[Path]:
    """A folder to work in, whose `model` is renamed to `target` at the end of the block: what is there is complete.

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
    """Whether this is a converted model. An empty folder, made by hand or by a container's mount, is none."""
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


def convert(gguf_file: Path, out: Path) -> None:
    """Write the GGUF file of a Llama model as config, safetensors (bfloat16), tokenizer and chat template to `out`."""
    _convert(gguf_file, out, in_codes=False)


def convert_in_codes(gguf_file: Path, out: Path) -> None:
    """As `convert`, but the projections stay as they are quantized, if `gguf_codes` has their type."""
    _convert(gguf_file, out, in_codes=True)


def _convert(gguf_file: Path, out: Path, in_codes: bool) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    from folovllm.models.gguf_codes import coded_weights

    try:
        reader = GGUFReader(gguf_file)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{gguf_file} is not a GGUF file, or damaged: {error}") from error
    meta = {name: field.contents() for name, field in reader.fields.items()}
    _check_known(gguf_file, meta)
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    coded, said = coded_weights(tensors, partial(_rows, meta)) if in_codes else ({}, {})
    out.mkdir(parents=True)
    (out / "tokenizer.json").write_text(_build_tokenizer(meta).to_str(pretty=True), encoding="utf-8")
    _write_json(out / "config.json", {**_config(meta, tensors), **said})
    _write_json(out / "generation_config.json", _special_ids(meta))
    _write_json(out / "tokenizer_config.json", _tokenizer_config(meta))
    types = said.get("quantization_config", {}).get("types", {})
    floats = {name: tensor for name, tensor in tensors.items() if name.removesuffix(".weight") not in types}
    save_file(coded | _weights(floats, meta), out / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(out / "config.json", out / "model.safetensors")  # save_file lets nobody else read it


def _check_known(gguf_file: Path, meta: dict[str, Any]) -> None:
    """Raise ValueError unless this is a Llama model with a tokenizer as SmolLM2's is."""
    family, tokenizer = meta.get("general.architecture"), meta.get("tokenizer.ggml.pre", "smollm")
    if family != "llama" or tokenizer != "smollm" or meta.get("tokenizer.ggml.model") != "gpt2":
        raise ValueError(
            f"{gguf_file} holds a model of architecture {family!r} with tokenizer {tokenizer!r}: of GGUF files those of "
            "architecture 'llama' with tokenizer 'smollm' are supported. Take the model's safetensors"
        )


def _weights(tensors: dict[str, Any], meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors under their Hugging Face names, dequantized."""
    import torch
    from gguf import dequantize
    from tqdm import tqdm

    weights = {}
    for name, tensor in tqdm(tensors.items(), desc="Converting", unit=" tensors"):
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF names the fastest dimension first
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type)).reshape(shape)
        weights[name] = _rows(meta, name, weight).to(torch.bfloat16).contiguous()
    return weights


def _rows(meta: dict[str, Any], name: str, weight: torch.Tensor) -> torch.Tensor:
    """The rows of a weight, or of what is known of each, in Hugging Face's order."""
    heads = {"q_proj": meta["llama.attention.head_count"], "k_proj": meta["llama.attention.head_count_kv"]}
    leaf = name.split(".")[-2]
    return _split_halves(weight, heads[leaf]) if leaf in heads else weight


def _split_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of q and k, `[num_heads * D, H]`.

    RoPE turns pairs of a head's dimensions. llama.cpp stores each pair's two rows side by side (0, 1), (2, 3), ...;
    Hugging Face's code pairs row i with row i + D/2. The wrong order still gives fluent nonsense, not an error.
    """
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[kind]}.weight"


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    ids = {"bos": "bos", "eos": "eos", "pad": "padding"}  # ours, GGUF's
    return {f"{ours}_token_id": meta[f"tokenizer.ggml.{theirs}_token_id"] for ours, theirs in ids.items()}


def _config(meta: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),  # was rounded to float32
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        **_special_ids(meta),
    }


def _build_tokenizer(meta: dict[str, Any]) -> Any:
    """Byte-level BPE as GGUF's "smollm" pre-tokenizer means it: every digit is a word of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _tokenizer_config(meta: dict[str, Any]) -> dict[str, Any]:
    tokens = meta["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],
        **{f"{ours}_token": tokens[meta[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in names.items()},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
