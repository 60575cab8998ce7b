"""The folder that is written: a file of weights for each layer as soon as it is done, `config.json` when all are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save

from folovllm.electives.quantization.quantizer.one_layer import Tensors
from folovllm.models.files import tokenizer_folder
from folovllm.models.loader import INDEX
from folovllm.models.written_files import write_whole

COPIED = ("*.json", "*.jinja", "*.txt", "*.model")  # tokenizer and generation
NOT_COPIED = ("config.json", INDEX)


class OutputFolder:
    """The folder of one quantized model. `config.json` is written last, so nobody takes an unfinished folder for a model.

    Raises:
        ValueError: the folder holds something, or cannot be written.
    """

    def __init__(self, path: Path, num_files: int) -> None:
        self.path, self.num_files = path, num_files
        self._files: list[Path] = []
        self._file_of: dict[str, str] = {}
        try:
            path.mkdir(parents=True, exist_ok=True)
            is_empty = not any(path.iterdir())
        except OSError as error:
            raise ValueError(f"cannot write to the folder {path}: {error.strerror}") from error
        if not is_empty:
            raise ValueError(f"{path} is not empty: name a folder that is")

    def write(self, tensors: Tensors) -> None:
        """Write the next file of weights, by the checkpoint's names."""
        file = self.path / f"model-{len(self._files) + 1:05}-of-{self.num_files:05}.safetensors"
        content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        write_whole(file, save(content, metadata={"format": "pt"}))
        self._files.append(file)
        self._file_of |= dict.fromkeys(content, file.name)

    def finish(self, source: Path, quant_config: dict[str, Any]) -> None:
        """Write the index, the tokenizer of `source`, and last of all its configuration with `quant_config`."""
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": self._file_of}
        write_whole(self.path / INDEX, json.dumps(index, indent=2))
        for folder in dict.fromkeys((tokenizer_folder(source), source)):
            for file in (file for pattern in COPIED for file in folder.glob(pattern) if file.name not in NOT_COPIED):
                write_whole(self.path / file.name, file.read_bytes())
        config = json.loads((source / "config.json").read_text()) | {"quantization_config": quant_config}
        write_whole(self.path / "config.json", json.dumps(config, indent=2))

    @property
    def num_bytes(self) -> int:
        """The size of all files with weights."""
        return sum(file.stat().st_size for file in self._files)
