"""The folder that is read, and the one that is written: a file of weights for each layer, and `config.json` when all are done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from folovllm.engine.require import require
from folovllm.models.extra_tensors import IGNORED_SUFFIX, weight_loader_of
from folovllm.models.files import reading, tokenizer_folder
from folovllm.models.llama import LlamaForCausalLM
from folovllm.models.loader import INDEX, checkpoint_places, pop_destination, read_tensors, require_finite
from folovllm.models.written_files import write_whole

Tensors = dict[str, torch.Tensor]
PREFIX = "model.layers."
EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")  # tokenizer and generation
NOT_COPIED = ("config.json", INDEX)


def read_checkpoint(path: Path, model: LlamaForCausalLM) -> tuple[list[Tensors], Tensors]:
    """Return each layer's tensors, named from the layer on ("mlp.up_proj.weight"), and those that are in no layer.

    They are views of memory-mapped files: only what is used is read. All headers, and what is in no layer, are checked here;
    layers are checked one by one, as they are loaded. `model` is the full one, empty, on the meta device.

    Raises:
        ValueError: a tensor is missing, left over, of another shape, quantized, or (in no layer) not finite.
    """
    stored = read_tensors(path, {}, None, lambda name, tensor: [(name, tensor)])
    tensors = {name: tensor for name, tensor in stored if not name.endswith(IGNORED_SUFFIX)}
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    places, tied = checkpoint_places(model), model.lm_head.weight is model.model.embed_tokens.weight
    with reading(f"the checkpoint in {path}"):
        for name, tensor in tensors.items():
            if not (weight_loader_of(name) or (tied and name == HEAD)):
                pop_destination(name, tensor.shape, places)
        require(not places, f"it lacks {', '.join(sorted(places)[:5])}")
        for name, tensor in rest.items():
            require_finite(name, tensor)
        same = not tied or torch.equal(rest.get(HEAD, rest[EMBEDDING]), rest[EMBEDDING])
        require(same, f"it holds a {HEAD!r} of its own: set tie_word_embeddings to false in its config")
    prefixes = [f"{PREFIX}{index}." for index in range(len(model.model.layers))]
    return [{n.removeprefix(p): t for n, t in tensors.items() if n.startswith(p)} for p in prefixes], rest


class OutputFolder:
    """The folder of one quantized model. `config.json` is written last, so nobody takes an unfinished folder for a model.

    Raises:
        ValueError: the folder holds something, or cannot be written.
    """

    def __init__(self, path: Path, num_files: int) -> None:
        self.path, self.num_files, self.num_bytes = path, num_files, 0
        self._file_of: dict[str, str] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            is_empty = not any(path.iterdir())
        except OSError as error:
            raise ValueError(f"cannot write to the folder {path}: {error.strerror}") from error
        require(is_empty, f"{path} is not empty: name a folder that is")

    def write(self, index: int, tensors: Tensors, prefix: str = "") -> None:
        """Write file `index` of the weights. The checkpoint's names are those of `tensors` behind `prefix`."""
        file = f"model-{index + 1:05}-of-{self.num_files:05}.safetensors"
        named = {prefix + name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        content = save(named, {"format": "pt"})
        write_whole(self.path / file, content)
        self.num_bytes += len(content)
        self._file_of |= dict.fromkeys(named, file)

    def finish(self, source: Path, quant_config: dict[str, Any]) -> None:
        """Write the index, the tokenizer of `source`, and last of all its configuration with `quant_config`."""
        for folder in (tokenizer_folder(source), source):
            for file in (file for pattern in COPIED for file in folder.glob(pattern) if file.name not in NOT_COPIED):
                write_whole(self.path / file.name, file.read_bytes())
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": self._file_of}
        write_whole(self.path / INDEX, json.dumps(index, indent=2))
        config = json.loads((source / "config.json").read_text()) | {"quantization_config": quant_config}
        write_whole(self.path / "config.json", json.dumps(config, indent=2))
