"""A text for the quantizer: most of it shows what inputs look like, the end of it is kept for the perplexity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from folovllm.config import EngineConfig
from folovllm.electives.quantization.quantizer.options import QuantizeOptions
from folovllm.engine.require import require
from folovllm.models.files import eos_token_ids, load_tokenizer, reading

OWN_TEXT = "calibration.jsonl"  # in the embedded model's folder
KEPT = 5  # one text in so many is for the perplexity alone


def read_texts(file: Path) -> list[str]:
    """Return the texts of a file of JSON lines, each an object with a "text" or a text itself; empty ones do not count.

    Raises:
        ValueError: the file cannot be read, or a line is something else (the sentence names it).
    """
    with reading(f"the calibration text {file}"):
        # Other ends of lines may stand in a JSON text as they are.
        lines = enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1)
    texts = []
    for number, line in lines:
        with reading(f"the calibration text {file}, line {number}"):
            text: Any = json.loads(line) if line.strip() else ""
            text = text.get("text") if isinstance(text, dict) else text
            require(isinstance(text, str), 'expected {"text": "..."} or a text in quotes')
            text.encode()  # half a character (a lone surrogate) has no bytes
            texts += [text] * bool(text)
    require(bool(texts), f'{file} holds no text: write a JSON object with a "text" on each line')
    return texts


def rows_of(
    path: Path, hf_config: Any, options: QuantizeOptions, calibration: Path | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of tokens to calibrate with, and others that only measure: [n, length] each, at most `samples`.

    The last fifth of the texts measures. Each part is joined, with the id that ends a text behind each, and cut into rows.
    There are none where there is no text and none is needed.

    Raises:
        ValueError: a text is needed, or one of the parts does not fill a row.
    """
    file, length = calibration or path / OWN_TEXT, options.length
    if calibration is None and not file.is_file():
        require(not options.is_calibrated, f"--format {options.format} needs a text: --calibration text.jsonl")
        none = torch.empty(0, length, dtype=torch.int64)
        return none, none
    texts, tokenizer = read_texts(file), load_tokenizer(path, EngineConfig(model=str(path)))
    end_id = min(eos_token_ids(path, hf_config, tokenizer), default=0)
    ids = [torch.tensor([*tokenizer(text, add_special_tokens=False)["input_ids"], end_id]) for text in texts]
    kept = max(1, len(ids) // KEPT)
    calibrating, measuring = (torch.cat([ids[0][:0], *part]) for part in (ids[:-kept], ids[-kept:]))
    require(
        min(len(calibrating), len(measuring)) >= length,
        f"the calibration text is too short for rows of {length} tokens: it has {len(calibrating)} to calibrate with and "
        f"{len(measuring)} in its last fifth, which measures the perplexity; add text, or lower --length",
    )
    rows = (
        part[: len(part) // length * length].view(-1, length)[: options.samples] for part in (calibrating, measuring)
    )
    return next(rows), next(rows)
