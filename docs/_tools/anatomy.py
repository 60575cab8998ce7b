"""What the book says of a model without running it: fields, tree, parameters, heads. `excerpts.py` writes it into the pages.

Everything is computed from `config.json`: the embedded model's, and for comparison a geometry that the benchmarks know.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from folovllm.apps.bench.contenders import GEOMETRIES
from folovllm.models.files import ASSETS
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.model_config import head_dim_of
from folovllm.models.registry import build_model

SMALL, LARGE = "stories-5m", "Qwen3-0.6B"
FOLDER = ASSETS / SMALL

MEANING = {  # what each field of the embedded model's config.json is for, in the order in which one reads them
    "architectures": "the class of the model, which uses the other fields ([adding a model](reference/adding_a_model.md))",
    "model_type": "the model's type in `transformers`; the type gives defaults for missing fields",
    "vocab_size": "`V`: rows of the embedding, and logits at the end",
    "hidden_size": "`H`: numbers in a token's vector between the layers",
    "num_hidden_layers": "`L`: layers, all of the same shape",
    "num_attention_heads": "`Hq`: query heads of a layer",
    "num_key_value_heads": "`Hkv`: key and value heads of a layer; the cache holds these",
    "head_dim": "`D`: numbers of a head. Without this field `D` is `H / Hq`, but a file may give another number, as on the right",
    "intermediate_size": "`I`: numbers in a token's vector inside the MLP",
    "hidden_act": "the function in the MLP's gate",
    "rms_norm_eps": "added to the mean square, so that a vector of zeros is not divided by 0",
    "rope_parameters": "base of RoPE's rotation, and its scaling if there is one (older files: `rope_theta`, `rope_scaling`)",
    "max_position_embeddings": "the longest context that the model should be used with",
    "tie_word_embeddings": "whether the head uses the embedding's matrix",
    "attention_bias": "whether the projections of attention have a bias",
    "dtype": "the type of the weights in the file (older files: `torch_dtype`)",
    "eos_token_id": "tokens that end an answer",
    "bos_token_id": "a token to put before each text; none here",
    "pad_token_id": "fills up rows of a padded batch. A ragged batch has no padding",
    "sliding_window": "how many tokens a layer with a window sees; none here",
    "use_sliding_window": "whether the model has layers with a window",
    "max_window_layers": "only in Qwen's files: the first layer with a window, if there are any",
    "layer_types": "whether a layer has full attention or a window",
    "use_cache": "whether `transformers` keeps keys and values. An engine always does",
    "attention_dropout": "only for training; nothing is dropped when a model answers",
    "initializer_range": "only for training: the standard deviation of the first random weights",
    "transformers_version": "the version of `transformers` that wrote the file",
}


@cache
def fields(model: str) -> dict[str, Any]:
    """`config.json` of the embedded model, or what is known of the other one."""
    if model == SMALL:
        content: dict[str, Any] = json.loads((FOLDER / "config.json").read_text("utf-8"))
        return content
    known = dict(GEOMETRIES[model.lower()])
    return known | {
        "dtype": known["torch_dtype"],
        "rope_parameters": {"rope_theta": known["rope_theta"], "rope_type": "default"},
    }


@cache
def config(model: str) -> PretrainedConfig:
    return AutoConfig.for_model(**fields(model))


@cache
def skeleton(model: str) -> LlamaForCausalLM:
    """The model without its weights: shapes alone."""
    return build_model(config(model), torch.bfloat16, "meta", max_model_len=64)


def letters(model: str) -> dict[str, int]:
    """The book's letters for the sizes of a model."""
    c = config(model)
    return {
        "V": c.vocab_size, "H": c.hidden_size, "L": c.num_hidden_layers, "Hq": c.num_attention_heads,
        "Hkv": c.num_key_value_heads, "D": head_dim_of(c), "I": c.intermediate_size,
    }  # fmt: skip


def table(head: str, *rows: tuple[object, ...]) -> str:
    """Markdown; whole numbers with commas."""
    shown = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    columns = head.split("|")
    assert all(len(row) == len(columns) for row in shown), f"{head}: a row has another length"
    return "\n".join(f"| {' | '.join(map(str.strip, row))} |" for row in (columns, ["---"] * len(columns), *shown))


def config_table() -> str:
    """Every field of the embedded model's file, in the order of `MEANING`. KeyError for one that has no meaning here."""
    ours, theirs = fields(SMALL), fields(LARGE)
    order = sorted(ours, key=list(MEANING).index)
    rows = [
        (f"`{name}`", _json(ours[name]), _json(theirs[name]) if name in theirs else "", MEANING[name]) for name in order
    ]
    return table(f"field | {SMALL} | {LARGE} | what it is", *rows)


def _json(value: Any) -> str:
    if isinstance(value, list) and len(value) > 2 and len(set(value)) == 1:
        return f"{len(value)} times `{json.dumps(value[0])}`"
    if isinstance(value, dict):
        return ", ".join(f"`{name}`: {_json(item)}" for name, item in value.items())
    return f"`{json.dumps(value)}`"


def module_tree() -> str:
    """The modules with their parameters; of the layers, which are all alike, the first."""
    model, lines, depth = skeleton(SMALL), [], 2
    for path, module in model.named_modules():
        parts = path.split(".")
        if not path or parts == ["model", "layers"] or (parts[:2] == ["model", "layers"] and parts[2] != "0"):
            continue
        name = parts[-1] if parts[-1] != "0" else f"layers.0 to layers.{letters(SMALL)['L'] - 1}"
        indent = depth * (len(parts) - 1 - (len(parts) > 2 and parts[1] == "layers"))
        lines.append(f"{' ' * indent + name:<30}{type(module).__name__:<28}{_weights(model, path, module)}".rstrip())
    return "\n".join(["```text", *lines, "```"])


def _weights(model: LlamaForCausalLM, path: str, module: nn.Module) -> str:
    if path == "lm_head" and config(SMALL).tie_word_embeddings:
        return "the embedding's weight"
    return ", ".join(f"{name} {list(weight.shape)}" for name, weight in module.named_parameters(recurse=False))


PARTS = {  # the last words of a parameter's name: what it is, and its size in letters
    "embed_tokens": ("embedding", "V · H"),
    "qkv_proj": ("queries, keys, values", "L · (Hq + 2 Hkv) · D · H"),
    "o_proj": ("output of attention", "L · H · Hq · D"),
    "q_norm": ("norm of query heads", "L · D"),
    "k_norm": ("norm of key heads", "L · D"),
    "gate_up_proj": ("gate and up", "L · 2 · I · H"),
    "down_proj": ("down", "L · H · I"),
    "input_layernorm": ("norm before attention", "L · H"),
    "post_attention_layernorm": ("norm before the MLP", "L · H"),
    "norm": ("last norm", "H"),
    "lm_head": ("head", "V · H, or 0 if tied"),
}


def parameters(model: str) -> Counter[str]:
    """How many numbers each part has, all layers together. Tied weights count once."""
    counts: Counter[str] = Counter(dict.fromkeys(PARTS, 0))
    for name, weight in skeleton(model).named_parameters():
        counts[name.split(".")[-2]] += weight.numel()
    return counts


def parameter_table() -> str:
    small, large = parameters(SMALL), parameters(LARGE)
    rows: list[tuple[object, ...]] = []
    for part, (what, size) in PARTS.items():
        shares = (f"{100 * counts[part] / counts.total():.1f}%" for counts in (small, large))
        rows.append((what, f"`{part}`", size, small[part], next(shares), large[part], next(shares)))
    total = ("**all**", "", "", small.total(), "100%", large.total(), "100%")
    return table(f"what | module | numbers | {SMALL} | | {LARGE} | ", *rows, total)


def head_table() -> str:
    """What the number of KV heads decides, other things equal."""
    rows: list[tuple[object, ...]] = []
    for model in (SMALL, LARGE):
        n = letters(model)
        for name, kv_heads in (("MHA", n["Hq"]), ("**GQA**", n["Hkv"]), ("MQA", 1)):
            per_token = 2 * n["L"] * kv_heads * n["D"] * 2
            rows.append(
                (model, name, n["Hq"], kv_heads, n["Hq"] // kv_heads, (n["Hq"] + 2 * kv_heads) * n["D"] * n["H"],
                 per_token, f"{per_token * 4096 / 2**20:,.0f} MiB")
            )  # fmt: skip
    head = "model | kind | Hq | Hkv | queries a KV head | weights of `qkv_proj`, a layer | cache, bytes a token | of 4,096 tokens"
    return table(head, *rows)


def activation_table() -> str:
    points = [-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0]
    x = torch.tensor(points)
    kinds = {"ReLU": nn.functional.relu, "GELU": nn.functional.gelu, "SiLU": nn.functional.silu}
    rows = [(name, *(f"{value:.2f}" for value in f(x))) for name, f in kinds.items()]
    return table(" | ".join(["x", *(f"{point:g}" for point in points)]), *rows)


def norm_table() -> str:
    """One token beside two different neighbours, through three norms without learned weights."""
    token, cases = [1.0, 2.0, 3.0, 6.0], {"beside [0, 0, 0, 0]": [0.0] * 4, "beside [9, 2, 3, 1]": [9.0, 2.0, 3.0, 1.0]}
    functions = {
        "BatchNorm": lambda x: (x - x.mean(0)) / (x.var(0, correction=0) + 1e-6).sqrt(),
        "LayerNorm": lambda x: nn.functional.layer_norm(x, (4,)),
        "RMSNorm": lambda x: nn.functional.rms_norm(x, (4,)),
    }
    rows = [
        (name, *(_vector(f(torch.tensor([token, neighbour]))[0]) for neighbour in cases.values()))
        for name, f in functions.items()
    ]
    return table(" | ".join(["[1, 2, 3, 6] after", *cases]), *rows)


def _vector(x: torch.Tensor) -> str:
    return "[" + ", ".join(f"{value + 0.0:.2f}" for value in x.tolist()) + "]"


def merged_table() -> str:
    """What `measure_merged.py` measured."""
    measured = json.loads((Path(__file__).parents[1] / "data" / "merged_h200.json").read_text("utf-8"))
    rows = [
        (
            row["what"],
            row["tokens"],
            f"{row['separate']:.1f}",
            f"{row['merged']:.1f}",
            f"{row['separate'] / row['merged']:.1f}",
        )
        for row in measured["rows"]
    ]
    return table(
        "projections | tokens | separate products, µs a layer | merged product, µs a layer | separate / merged", *rows
    )
