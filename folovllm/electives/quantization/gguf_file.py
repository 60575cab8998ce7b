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
from typing import TYPE_CHECKING, Any

from folovllm.models.files import reading
from folovllm.models.written_files import cache_dir

if TYPE_CHECKING:
    import torch
    from gguf.gguf_reader import ReaderTensor

Values = dict[str, Any]  # what the file says, by its keys
BLOCK_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ROPE, _THETA = "rope_freqs.weight", 10_000.0
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_TOKENS = "tokenizer.ggml."


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


def is_complete(folder: Path) -> bool:
    """Return whether this is a converted model. An empty folder, made by hand or by a container's mount, is none."""
    return (folder / "config.json").is_file()


@contextmanager
def becoming(target: Path, failure: str, hint: str = "") -> Iterator[Path]:
    """Give a folder to work in, whose `model` is renamed to `target` at the end of the block; so `target` is always complete.

    Of two processes the quicker one wins. What a killed one left is removed a day later.

    Raises:
        ValueError: `failure`, why, and `hint`: the disk did not take it. Nothing is left behind.
    """
    from safetensors import SafetensorError

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(".smollm2-*"):
            if left.stat().st_mtime < time.time() - 86_400:
                shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as work:
            yield Path(work)
            try:
                Path(work, "model").rename(target)  # an empty folder gives way
            except OSError:
                if not is_complete(target):
                    raise
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{failure}: {error}. {hint}FOLOVLLM_CACHE names another folder") from error


def convert(gguf_file: Path, out: Path, in_codes: bool = False) -> None:
    """Write the GGUF file of a Llama model as config, safetensors (bfloat16), tokenizer and chat template to `out`.

    With `in_codes` the projections stay quantized, if `gguf_codes` has their type. All of the file is read before anything is written.
    """
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    from folovllm.electives.quantization.gguf_codes import coded_weights
    from folovllm.electives.quantization.gguf_reader import read_gguf

    meta, theirs = read_gguf(gguf_file)
    with reading(gguf_file):
        _check_known(meta)
        config = _config(meta) | _rope(meta, theirs.pop(_ROPE, None))
        tensors = {_hf_name(name): tensor for name, tensor in theirs.items()}
        texts = {"tokenizer.json": _tokenizer(meta), "tokenizer_config.json": json.dumps(_tokenizer_config(meta))}
    weights, said = coded_weights(gguf_file, tensors, partial(_rows, config)) if in_codes else ({}, {})
    coded = said.get("quantization_config", {}).get("types", {})
    for name, tensor in tqdm(tensors.items(), desc="Converting", unit=" tensors"):
        if name.removesuffix(".weight") not in coded:
            with reading(gguf_file, name):
                weights[name] = _rows(config, name, _floats(tensor)).to(torch.bfloat16).contiguous()
    config |= _biases(weights, tensors) | {"tie_word_embeddings": "lm_head.weight" not in tensors} | said
    texts |= {"generation_config.json": json.dumps(_special_ids(meta)), "config.json": json.dumps(config, indent=2)}
    out.mkdir(parents=True)
    for file, text in texts.items():
        (out / file).write_text(text, encoding="utf-8")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(out / "config.json", out / "model.safetensors")  # save_file lets nobody else read it


def _check_known(meta: Values) -> None:
    """Raise ValueError unless this is a Llama model with a tokenizer as SmolLM2's is, of whole sizes."""
    family, tokenizer = meta.get("general.architecture"), meta.get(f"{_TOKENS}pre", "smollm")
    if family != "llama" or tokenizer != "smollm" or meta.get(f"{_TOKENS}model") != "gpt2":
        raise ValueError(
            f"it holds a model of architecture {family!r} with tokenizer {tokenizer!r}: of GGUF files those of architecture "
            "'llama' with tokenizer 'smollm' are supported. Take the model's safetensors"
        )
    for key in (f"llama.{name}" for name in _SIZES):
        if not (isinstance(size := meta.get(key), int) and 0 < size < 2**31):
            raise ValueError(f"{key} is {size!r}, and must be a whole number of at least 1")


def _floats(tensor: ReaderTensor) -> torch.Tensor:
    """Return a tensor in float32. Raises ValueError if it is of a type that cannot be unpacked."""
    import torch
    from gguf import dequantize

    try:
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        raise ValueError(f"tensors of type {tensor.tensor_type.name} are not supported") from error


def _rows(config: Values, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of a weight, of a bias, or of codes or scales, in Hugging Face's order: [outputs, ...].

    RoPE turns pairs of a head's dimensions. llama.cpp stores each pair's two rows of q and k side by side (0, 1), (2, 3), ...;
    Hugging Face's code pairs row i with row i + D/2. The wrong order still gives fluent nonsense, not an error.
    """
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ValueError for a tensor that no Llama has here."""
    match name.split("."):
        case [top, "weight"] if top in _TOP_NAMES:
            return f"{_TOP_NAMES[top]}.weight"
        case ["blk", layer, part, "weight" | "bias" as kind] if layer.isdecimal() and part in BLOCK_NAMES:
            return f"model.layers.{layer}.{BLOCK_NAMES[part]}.{kind}"
    raise ValueError(f"it holds a tensor {name}, for which the model has no place")


def _biases(weights: dict[str, torch.Tensor], tensors: dict[str, ReaderTensor]) -> dict[str, bool]:
    """Return the configuration's fields about biases. Where some projections have a bias, the others get one of zeros."""
    import torch

    said = {}
    outputs = {name.removesuffix("weight"): int(t.shape[-1]) for name, t in tensors.items() if t.shape.size == 2}
    for field, block in (("attention_bias", ".self_attn."), ("mlp_bias", ".mlp.")):
        sizes = {f"{layer}bias": size for layer, size in outputs.items() if block in layer}
        said[field] = any(name in weights for name in sizes)
        for name in sizes if said[field] else ():
            weights.setdefault(name, torch.zeros(sizes[name], dtype=torch.bfloat16))
    return said


def _special_ids(meta: Values) -> dict[str, int | None]:
    theirs = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": meta.get(f"{_TOKENS}{name}_token_id") for ours, name in theirs.items()}


def _config(meta: Values) -> Values:
    """Return the configuration, under the names that transformers has for GGUF's. Raises ValueError if only a part of a head is rotated."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    names = {f"llama.{theirs}": ours for theirs, ours in GGUF_CONFIG_MAPPING["llama"].items() if ours}
    given = {ours: meta[theirs] for theirs, ours in names.items() if theirs in meta}
    size = int(meta.get("llama.attention.key_length", given["hidden_size"] // given["num_attention_heads"]))
    if given.get("head_dim", size) != size:
        raise ValueError(
            f"llama.rope.dimension_count is {given['head_dim']}, and only whole heads, of {size}, are supported"
        )
    said = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "head_dim": size,
        "vocab_size": len(meta[f"{_TOKENS}tokens"]), "rms_norm_eps": round(given["rms_norm_eps"], 9),  # was rounded to float32
    }  # fmt: skip
    defaults = {"num_key_value_heads": given["num_attention_heads"], "rope_theta": _THETA}
    return defaults | given | said | _special_ids(meta)


def _rope(meta: Values, factors: ReaderTensor | None) -> Values:
    """Return the configuration's field about scaled angles, if they are scaled.

    llama.cpp writes linear scaling and YaRN as values. Llama 3's scaling becomes a tensor, `rope_freqs.weight` [D/2]: the divisor
    of each frequency (`generate_extra_tensors` in its `convert_hf_to_gguf.py`). Hugging Face's code computes these from four numbers.

    Raises:
        ValueError: the scaling is of a kind that is not supported, or lacks a number.
    """
    kind = meta.get("llama.rope.scaling.type", "none")
    said = {} if factors is None else _scaling_by(_floats(factors), meta)
    if kind in ("linear", "yarn") and not said:
        said = {"rope_type": kind, "factor": meta["llama.rope.scaling.factor"]}
        if kind == "yarn":
            said["original_max_position_embeddings"] = meta["llama.rope.scaling.original_context_length"]
    elif kind != "none":
        raise ValueError(f"llama.rope.scaling.type {kind!r}{f' with {_ROPE}' if said else ''} is not supported")
    return {"rope_scaling": said} if said else {}


def _scaling_by(factors: torch.Tensor, meta: Values) -> Values:
    """Return the `rope_scaling` that divides frequencies by `factors` [D/2]. Raises ValueError if there is none.

    A factor between 1 and the largest one gives the number of turns of its pair in the first training's context, and so the
    length of that context. Without such a factor it is the shortest that the last unscaled pair allows.
    """
    import torch

    from folovllm.layers.rope_scaling import scale_llama3

    if factors.shape != (_config(meta)["head_dim"] // 2,):
        raise ValueError(f"{_ROPE} has shape {list(factors.shape)}, and must have one factor for each pair of a head")
    largest, low, high = float(factors.max()), 1.0, 4.0  # the last two are those of all Llama 3 models
    if (factors == largest).all():
        return {} if largest == 1 else {"rope_type": "linear", "factor": largest}
    frequencies = meta.get("llama.rope.freq_base", _THETA) ** (-torch.arange(len(factors)) / len(factors))
    kept = (1 / factors - 1 / largest) / (1 - 1 / largest)  # 1: as it was; 0: divided by the largest
    contexts = 2 * math.pi * (low + kept * (high - low)) / frequencies
    between = contexts[(kept > 1e-4) & (kept < 1 - 1e-4)]
    context = round(float(between[0])) if len(between) else math.ceil(float(contexts[kept > 0.5].max()))
    said = {"rope_type": "llama3", "factor": largest, "low_freq_factor": low, "high_freq_factor": high}
    said["original_max_position_embeddings"] = context
    if not torch.allclose(frequencies / scale_llama3(frequencies, said, context), factors, rtol=1e-3):
        raise ValueError(f"{_ROPE} scales in another way than Llama 3 does, which is not supported")
    return said


def _tokenizer(meta: Values) -> str:
    """Return the byte-level BPE of GGUF's "smollm" pre-tokenizer, as JSON: every digit is a word of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta[f"{_TOKENS}tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta[f"{_TOKENS}merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, meta.get(f"{_TOKENS}token_type", [0] * len(tokens)), strict=True)
    special = [token for token, kind in kinds if kind == 3]  # GGUF's token type "control"
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return str(tokenizer.to_str(pretty=True))


def _tokenizer_config(meta: Values) -> Values:
    """Return the tokenizer's configuration. A base model has no chat template, and special tokens may be absent."""
    ids = _special_ids(meta) | {"unk_token_id": meta.get(f"{_TOKENS}unknown_token_id")}
    said = {name.removesuffix("_id"): meta[f"{_TOKENS}tokens"][id_] for name, id_ in ids.items() if id_ is not None}
    if (template := meta.get("tokenizer.chat_template")) is not None:
        said["chat_template"] = template
    more = {"model_max_length": meta["llama.context_length"], "clean_up_tokenization_spaces": False}
    return {"tokenizer_class": "PreTrainedTokenizerFast"} | more | said
