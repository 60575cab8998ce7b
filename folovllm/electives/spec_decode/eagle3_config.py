"""Reads the folder of an EAGLE-3 head: the configuration, in two layouts, the shapes of tensors, and `d2t`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from folovllm.models.files import read_json, reading
from folovllm.models.loader import checkpoint_files, opened
from folovllm.models.model_config import num_kv_heads_of

NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads")
DEFAULTS: dict[str, Any] = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-6, "num_hidden_layers": 1, "attention_bias": False,
    "mlp_bias": False, "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
}  # fmt: skip


class Eagle3Config(SimpleNamespace):
    """The configuration of an EAGLE-3 head: Llama's fields, and those below.

    Attributes:
        target_hidden_size: H of the target. draft_vocab_size: the ids that the head knows. vocab_size: the target's.
        aux_layers: the target's layers whose input the head reads, ascending; L stands for the output of the last layer.
        norm_before_residual: the residual stream begins after the norm of the hidden state, not before it.
        norm_output: the next step of a chain reads the hidden state after the last norm, not before it.
        norm_before_fc, fc_norm: norms before the projection of the target's hidden states: one for all, or one for each.
    """

    @classmethod
    def read(cls, path: Path, target: Any) -> Eagle3Config:
        """Return the configuration in folder `path`, for a target with this `PretrainedConfig`.

        Two layouts are known: that of EAGLE's authors, which is Llama's with more fields, and that of the library speculators,
        which has Llama's fields in `transformer_layer_config`.

        Raises:
            ValueError: the file cannot be read, or the head does not fit the target. The message names the file.
        """
        file = path / "config.json"
        with reading(file):
            given = read_json(file)
            if (kind := given.get("speculators_model_type")) is not None:
                if kind != "eagle3":
                    raise ValueError(f"speculators_model_type is {kind!r}, and only 'eagle3' is known here")
                layer = dict(given["transformer_layer_config"])
                own = {name: value for name, value in given.items() if value is not None and name != "model_type"}
                given = {**layer, "norm_before_residual": True, **own}
            elif not any("Eagle3" in name for name in given.get("architectures") or []):
                raise ValueError(f"it is of {given.get('architectures')}, and no EAGLE-3 head")
            return cls.of(given, target)

    @classmethod
    def of(cls, given: dict[str, Any], target: Any) -> Eagle3Config:
        """Return the configuration with defaults filled in. Raises ValueError if it does not fit the target."""
        if absent := [name for name in NEEDED if not isinstance(given.get(name), int)]:
            raise ValueError(f"{absent[0]} is {given.get(absent[0])!r}")
        config = cls(**{**DEFAULTS, **{name: value for name, value in given.items() if value is not None}})
        config.target_hidden_size = getattr(config, "target_hidden_size", config.hidden_size)
        config.vocab_size = target.vocab_size
        config.draft_vocab_size = getattr(config, "draft_vocab_size", target.vocab_size)
        config.aux_layers = aux_layers_of(config, target.num_hidden_layers)
        layers, size, count = config.num_hidden_layers, config.target_hidden_size, config.draft_vocab_size
        heads, vocab_size = config.num_attention_heads, given.get("vocab_size", target.vocab_size)
        for fits, message in (
            (layers == 1, f"num_hidden_layers is {layers}, and only heads of one layer are known here"),
            (
                heads % num_kv_heads_of(config) == 0,
                f"num_attention_heads {heads} is no multiple of num_key_value_heads",
            ),
            (size == target.hidden_size, f"the head reads hidden states of {size} numbers, not {target.hidden_size}"),
            (
                0 < count <= target.vocab_size,
                f"draft_vocab_size is {count}, and the model knows {target.vocab_size} ids",
            ),
            (vocab_size == target.vocab_size, f"vocab_size is {vocab_size}, and the model's is {target.vocab_size}"),
        ):
            if not fits:
                raise ValueError(message)
        return config


def aux_layers_of(config: Any, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose input the head reads: those in the configuration, else EAGLE's usual three. Raises ValueError."""
    eagle: dict[str, Any] = getattr(config, "eagle_config", None) or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise ValueError("use_aux_hidden_state is false: a head that reads the last hidden state alone is not EAGLE-3")
    given = eagle.get("eagle_aux_hidden_state_layer_ids") or getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    layers = tuple(given or (2, num_layers // 2, num_layers - 3))
    if not all(isinstance(i, int) and 0 <= i <= num_layers for i in layers) or len({*layers}) < len(layers):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids are {[*layers]}: they must differ, and the model has layers 0 to {num_layers - 1}"
        )
    return tuple(sorted(layers))  # a checkpoint's `fc` reads them in this order, whatever the order of the list


def local_name(name: str) -> str | None:
    """Return our name of a tensor in the folder; None for `d2t` and other tensors that are no weights."""
    name = name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)
    return None if name in ("d2t", "t2d") or name.startswith("verifier_") else name


def stored_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shapes of a folder's weights, by our names. Only headers are read."""
    found: dict[str, list[int]] = {}
    for file in checkpoint_files(path):
        with opened(file) as handle:
            names = {name: local_name(name) for name in handle.keys()}  # noqa: SIM118  # a handle is no dict
            found |= {own: handle.get_slice(name).get_shape() for name, own in names.items() if own is not None}
    return found


def read_d2t(path: Path, config: Eagle3Config, vocab_size: int, stored: dict[str, list[int]]) -> torch.Tensor | None:
    """Return `d2t` [draft_vocab_size] int64: the target's id minus the draft id. None if both vocabularies are the same.

    Raises ValueError if a smaller vocabulary has no `d2t`, or if `d2t` gives an id twice or one that the target lacks.
    """
    d2t = None
    for file in checkpoint_files(path):
        with opened(file) as handle:
            if "d2t" in handle.keys():  # noqa: SIM118
                d2t = handle.get_tensor("d2t").long()
    count = config.draft_vocab_size
    if d2t is None:
        if count < vocab_size:
            raise ValueError(f"the head in {path} lacks 'd2t', which a vocabulary of {count} of {vocab_size} ids needs")
        return None
    if list(d2t.shape) != [count]:
        raise ValueError(f"the head in {path}: 'd2t' has shape {list(d2t.shape)}, and draft_vocab_size is {count}")
    ids = d2t + torch.arange(count)
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) < count:
        raise ValueError(
            f"the head in {path}: 'd2t' does not lead to {count} ids of the model, each below {vocab_size}"
        )
    if "lm_head.weight" not in stored:
        raise ValueError(f"the head in {path} has 'd2t' and lacks 'lm_head.weight', whose ids it maps")
    return d2t
