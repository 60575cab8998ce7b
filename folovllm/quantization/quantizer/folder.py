"""The folder that is written: a file for each layer as soon as it is done, `config.json` when all are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save

from folovllm.files import write_whole
from folovllm.models.files import reading, tokenizer_folder
from folovllm.models.loader import INDEX, opened
from folovllm.quantization.quantizer.one_layer import PREFIX, Tensors

RECORD = "quantize.json"  # what the folder is made from, and at the end how good it is
COPIED = ("*.json", "*.jinja", "*.txt", "*.model")  # tokenizer and generation
NOT_COPIED = ("config.json", INDEX, RECORD)


class OutputFolder:
    """One quantised model, finished or begun.

    A file is there as a whole or not at all. `config.json` is written last, so nobody takes an unfinished folder for a model.

    Raises:
        ValueError: the folder holds something else, or was made from something else (the sentence says what differs).
    """

    def __init__(self, path: Path, num_layers: int, made_from: dict[str, Any]) -> None:
        self.path, self.num_layers, self._made_from = path, num_layers, made_from
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot make the folder {path}: {error.strerror}") from error
        record = path / RECORD
        if record.is_file():
            with reading(f"{record}, and so cannot go on there (name another folder)"):
                begun = dict(json.loads(record.read_text())["made_from"])
            self._check(begun)
        elif any(path.iterdir()):
            raise ValueError(f"{path} is not empty: name a folder that is, or one that this command has begun")
        else:
            self._write_record(None)

    def _check(self, begun: dict[str, Any]) -> None:
        for name, now in self._made_from.items():
            if begun.get(name) != now:
                raise ValueError(
                    f"{self.path} was begun with {name} {begun.get(name)}, and now it is {now}: "
                    "take the old value, or another folder"
                )

    def _write_record(self, quality: dict[str, Any] | None) -> None:
        record = {"made_from": self._made_from, "quality": quality}
        write_whole(self.path / RECORD, json.dumps(record, indent=2))

    def finished(self) -> dict[str, Any] | None:
        """What `finish` was told of the quality; None if the folder is not finished."""
        files = [self.path / "config.json", *(self._file(number) for number in range(self.num_layers + 1))]
        if not all(file.is_file() for file in files):
            return None
        with reading(self.path / RECORD):
            quality: dict[str, Any] = json.loads((self.path / RECORD).read_text())["quality"]
            return quality

    def _file(self, number: int) -> Path:
        """Layers have numbers from 0, and what is in no layer has the last one."""
        count = self.num_layers + 1
        return self.path / f"model-{number + 1:05}-of-{count:05}.safetensors"

    def has_layer(self, index: int) -> bool:
        """Whether a layer is done."""
        return self._file(index).is_file()

    def write_layer(self, index: int, tensors: Tensors) -> None:
        """Write a layer's tensors, which are named from the layer on."""
        self._write(index, {f"{PREFIX}{index}.{name}": tensor for name, tensor in tensors.items()})

    def read_layer(self, index: int) -> Tensors:
        """What `write_layer` was given. Raises ValueError if the file has been damaged since."""
        try:
            tensors = load_file(self._file(index))
        except SafetensorError as error:
            raise ValueError(
                f"{self._file(index)} is damaged ({error}): remove it, and the same command makes it again"
            ) from error
        return {name.removeprefix(f"{PREFIX}{index}."): tensor for name, tensor in tensors.items()}

    def finish(self, source: Path, rest: Tensors, quantization: dict[str, Any], quality: dict[str, Any]) -> None:
        """Write what is in no layer, the index, the tokenizer, and last of all the configuration."""
        self._write(self.num_layers, rest)
        files = [self._file(number) for number in range(self.num_layers + 1)]
        where: dict[str, str] = {}
        for file in files:
            with opened(file) as handle:
                where |= dict.fromkeys(handle.keys(), file.name)
        index = {"metadata": {"total_size": self.num_bytes()}, "weight_map": where}
        write_whole(self.path / INDEX, json.dumps(index, indent=2))
        for folder in dict.fromkeys((tokenizer_folder(source), source)):
            for file in (file for pattern in COPIED for file in folder.glob(pattern) if file.name not in NOT_COPIED):
                write_whole(self.path / file.name, file.read_bytes())
        self._write_record(quality)
        config = json.loads((source / "config.json").read_text()) | {"quantization_config": quantization}
        write_whole(self.path / "config.json", json.dumps(config, indent=2))

    def num_bytes(self) -> int:
        """The size of all files with weights."""
        return sum(file.stat().st_size for file in self.path.glob("model-*.safetensors"))

    def _write(self, number: int, tensors: Tensors) -> None:
        content = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        write_whole(self._file(number), save(content, metadata={"format": "pt"}))
