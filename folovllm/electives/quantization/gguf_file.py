"""A GGUF file of a Llama model as a folder in Hugging Face format, so that nothing else in FoloVLLM knows of GGUF."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from gguf.gguf_reader import ReaderTensor
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from folovllm.electives.quantization.gguf_weights import quantized_weights
from folovllm.engine.require import require
from folovllm.models.files import reading
from folovllm.models.written_files import cache_dir

if TYPE_CHECKING:
    from transformers import LlamaConfig, PreTrainedTokenizerFast

Values = dict[str, Any]  # the file's metadata, by its keys
BLOCK_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_TOKENS = "tokenizer.ggml."


def gguf_dir(file: Path) -> Path:
    """Return the folder of a GGUF file with quantized weights: written on the first call, and kept in the cache.

    Raises:
        ValueError: the file is damaged, or its model or tokenizer is not supported; or the folder cannot be written.
            Nothing is left behind then.
    """
    stat = file.stat()
    target = cache_dir() / "gguf" / f"{file.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}"
    if not is_complete(target):
        with atomic_folder(target, f"cannot convert {file} into {target.parent}") as work:
            convert(file, work / "model", keep_quantized=True)
    return target


def is_complete(folder: Path) -> bool:
    """Return whether this is a converted model. An empty folder, made by hand or by a container's mount, is none."""
    return (folder / "config.json").is_file()


@contextmanager
def atomic_folder(target: Path, failure: str, hint: str = "") -> Iterator[Path]:
    """Yield a temporary folder, whose `model` is renamed to `target` at the end of the block; so `target` is always complete.

    Of two processes the quicker one wins. What a killed one left is removed a day later.

    Raises:
        ValueError: `failure`, why, and `hint`: the disk did not take it. Nothing is left behind.
    """
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


def convert(gguf_file: Path, out: Path, keep_quantized: bool = False) -> None:
    """Write the GGUF file of a Llama model as config, safetensors (bfloat16), tokenizer and chat template to `out`.

    With `keep_quantized` projections stay quantized if `gguf_weights` has their type. All of the file is read before
    anything is written.
    """
    values, stored = read_gguf(gguf_file)
    with reading(gguf_file):
        _check_supported(values)
        config = _config(values)
        tensors = {_hf_name(name): tensor for name, tensor in stored.items()}
        config.tie_word_embeddings = "lm_head.weight" not in tensors
        tokenizer = _tokenizer(values)
    in_hf_order = partial(_in_hf_order, config)
    weights, types = quantized_weights(gguf_file, tensors if keep_quantized else {}, in_hf_order)
    if keep_quantized:
        config.quantization_config = {"quant_method": "gguf", "types": types}
    for name, tensor in tqdm(tensors.items(), desc="Converting", unit=" tensors"):
        if name.removesuffix(".weight") not in types:
            with reading(gguf_file, name):
                weights[name] = in_hf_order(name, _floats(tensor)).to(torch.bfloat16).contiguous()
    config.save_pretrained(out)
    tokenizer.save_pretrained(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(out / "config.json", out / "model.safetensors")  # save_file lets nobody else read it


class BoundedReader(GGUFReader):  # type: ignore[misc]  # the library has no types
    """Refuses what lies behind the end of the file. The library reads nothing there, and goes on: a file of 49 bytes
    that counts 2^40 numbers could keep it busy for ever.
    """

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        found: np.ndarray = super()._get(offset, dtype, count, override_order)
        require(len(found) >= count, f"the file ends within {count} numbers that begin at byte {offset}")
        return found


def read_gguf(file: Path) -> tuple[Values, dict[str, ReaderTensor]]:
    """Return the values by their keys, and the tensors (in the memory-mapped file) by their names.

    Raises:
        ValueError: it is no GGUF file, or a damaged one.
    """
    with reading(file):
        reader = BoundedReader(file)
        require(reader.byte_order != "S", "its numbers are big-endian, which is not supported")
        require(sum(tensor.n_bytes for tensor in reader.tensors) <= len(reader.data), "tensors overlap")
        values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        return values, {tensor.name: tensor for tensor in reader.tensors}


def _check_supported(values: Values) -> None:
    """Raise ValueError unless this is a Llama model with SmolLM2's kind of tokenizer, whole sizes and RoPE as it was trained."""
    family, tokenizer = values.get("general.architecture"), values.get(f"{_TOKENS}pre", "smollm")
    require(
        (family, tokenizer, values.get(f"{_TOKENS}model")) == ("llama", "smollm", "gpt2"),
        f"it holds a model of architecture {family!r} with tokenizer {tokenizer!r}: of GGUF files those of architecture "
        "'llama' with tokenizer 'smollm' are supported. Take the model's safetensors",
    )
    for key in (f"llama.{name}" for name in _SIZES):
        fits = isinstance(size := values.get(key), int) and 0 < size < 2**31
        require(fits, f"{key} is {size!r}, and must be a whole number of at least 1")
    scaling = values.get("llama.rope.scaling.type", "none")
    require(scaling == "none", f"llama.rope.scaling.type {scaling!r} is not supported: take the model's safetensors")


def _config(values: Values) -> LlamaConfig:
    """Return transformers' configuration. Raises ValueError if only a part of a head is rotated."""
    from transformers import LlamaConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    keys = {f"llama.{key}": field for key, field in GGUF_CONFIG_MAPPING["llama"].items()}
    fields = {field: values[key] for key, field in keys.items() if key in values}
    fields |= {"vocab_size": len(values[f"{_TOKENS}tokens"]), "dtype": "bfloat16", **_special_ids(values)}
    config = LlamaConfig(architectures=["LlamaForCausalLM"], **fields)
    size, rotated = (
        values.get("llama.attention.key_length", config.hidden_size // config.num_attention_heads),
        config.head_dim,
    )
    require(rotated == size, f"llama.rope.dimension_count is {rotated}, and only whole heads, of {size}, are supported")
    return config


def _floats(tensor: ReaderTensor) -> torch.Tensor:
    """Return a tensor in float32. Raises ValueError if it is of a type that cannot be unpacked."""
    try:
        return torch.tensor(dequantize(tensor.data, tensor.tensor_type))
    except NotImplementedError as error:
        raise ValueError(f"tensors of type {tensor.tensor_type.name} are not supported") from error


def _in_hf_order(config: LlamaConfig, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of a weight, or of its quantized numbers or scales, in Hugging Face's order: [outputs, ...].

    RoPE turns pairs of a head's dimensions. llama.cpp stores each pair's two rows of q and k side by side (0, 1), (2, 3), ...;
    Hugging Face's code pairs row i with row i + D/2. The wrong order still gives fluent nonsense, not an error.
    """
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`. Raises ValueError for a tensor that no Llama has here."""
    match name.split("."):
        case [top, "weight"] if top in _TOP_NAMES:
            return f"{_TOP_NAMES[top]}.weight"
        case ["blk", layer, part, "weight"] if layer.isdecimal() and part in BLOCK_NAMES:
            return f"model.layers.{layer}.{BLOCK_NAMES[part]}.weight"
    raise ValueError(f"it holds a tensor {name}, which is not supported: take the model's safetensors")


def _special_ids(values: Values) -> dict[str, int | None]:
    theirs = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{ours}_token_id": values.get(f"{_TOKENS}{name}_token_id") for ours, name in theirs.items()}


def _tokenizer(values: Values) -> PreTrainedTokenizerFast:
    """Return the byte-level BPE of GGUF's "smollm" pre-tokenizer: every digit is a word of its own.

    A base model has no chat template, and special tokens may be absent.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = values[f"{_TOKENS}tokens"]
    merges = [tuple(merge.split(" ")) for merge in values[f"{_TOKENS}merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = zip(tokens, values.get(f"{_TOKENS}token_type", [0] * len(tokens)), strict=True)
    special = [token for token, token_type in types if token_type == 3]  # GGUF's "control"
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    template = values.get("tokenizer.chat_template")
    require(isinstance(template, str | None), "tokenizer.chat_template must be a text")
    ids = _special_ids(values) | {"unk_token_id": values.get(f"{_TOKENS}unknown_token_id")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, model_max_length=values["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{name.removesuffix("_id"): tokens[id_] for name, id_ in ids.items() if id_ is not None},
    )  # fmt: skip
