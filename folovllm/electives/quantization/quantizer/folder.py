"""The folder that is written: a file for each layer as soon as it is done, `config.json` when all are."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from safetensors.torch import load_file, save

from folovllm.electives.quantization.quantizer.one_layer import PREFIX, Tensors
from folovllm.models.files import tokenizer_folder
from folovllm.models.loader import INDEX
from folovllm.models.written_files import write_whole

COPIED = ("*.json", "*.jinja", "*.txt", "*.model")  # tokenizer and generation
NOT_COPIED = ("config.json", INDEX)


class OutputFolder:
    """The folder of one quantised model.

    A file is there as a whole or not at all. `config.json` is written last, so nobody takes an unfinished folder for a model.

    Raises:
        ValueError: the folder holds something, or cannot be written.
    """

    def __init__(self, path: Path, num_layers: int) -> None:
        self.path, self.num_layers = path, num_layers
        self._file_of: dict[str, str] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path).close()
            is_empty = not any(path.iterdir())
        except OSError as error:
            raise ValueError(f"cannot write to the folder {path}: {error.strerror}") from error
        if not is_empty:
            raise ValueError(f"{path} is not empty: name a folder that is")

    def _file(self, number: int) -> Path:
        """Layers have numbers from 0, and what is in no layer has the last one."""
        count = self.num_layers + 1
        return self.path / f"model-{number + 1:05}-of-{count:05}.safetensors"

    def write_layer(self, index: int, tensors: Tensors) -> None:
        """Write a layer's tensors, which are named from the layer on."""
        self._write(index, {f"{PREFIX}{index}.{name}": tensor for name, tensor in tensors.items()})

    def read_layer(self, index: int) -> Tensors:
        """What `write_layer` was given."""
        tensors = load_file(self._file(index))
        return {name.removeprefix(f"{PREFIX}{index}."): tensor for name, tensor in tensors.items()}

    def finish(self, source: Path, rest: Tensors, quantization: dict[str, Any]) -> None:
        """Write what is in no layer, the index, the tokenizer, and last of all the configuration."""
        self._write(self.num_layers, rest)
        index = {"metadata": {"total_size": self.num_bytes()}, "weight_map": self._file_of}
        write_whole(self.path / INDEX, json.dumps(index, indent=2))
        for folder in dict.fromkeys((tokenizer_folder(source), source)):
            for file in (file for pattern in COPIED for file in folder.glob(pattern) if file.name not in NOT_COPIED):
                write_whole(self.path / file.name, file.read_bytes())
        config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
        write_whole(self.path / "config.json", json.dumps(config, indent=2))

    def num_bytes(self) -> int:
        """The size of all files with weights."""
        return sum(file.stat().st_size for file in self.path.glob("model-*.safetensors"))

    def _write(self, number: int, tensors: Tensors) -> None:
        content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        write_whole(file := self._file(number), save(content, metadata={"format": "pt"}))
        self._file_of |= dict.fromkeys(content, file.name)
