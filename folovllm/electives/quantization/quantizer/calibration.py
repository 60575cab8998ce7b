"""A text for the quantizer: most of it shows what inputs look like, the end of it is kept for the perplexity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from folovllm.config import EngineConfig
from folovllm.electives.quantization.quantizer.options import QuantizeOptions
from folovllm.models.files import eos_token_ids, load_tokenizer, reading

OWN_TEXT = "calibration.jsonl"  # in the embedded model's folder
KEPT = 5  # one text in so many is for the perplexity alone


def read_texts(file: Path) -> list[str]:
    """Return the texts of a file of JSON lines, each an object with a "text" or a text itself; empty ones do not count.

    Raises:
        ValueError: the file cannot be read, or a line is something else (the sentence names it).
    """
    texts = []
    with reading(f"the calibration text {file}"):
        # Other ends of lines may stand in a JSON text as they are.
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            with reading(f"the calibration text {file}, line {number}"):
                content = json.loads(line)
                text = content.get("text") if isinstance(content, dict) else content
                if not isinstance(text, str):
                    raise ValueError('expected {"text": "..."} or a text in quotes')
                text.encode()  # half a character (a lone surrogate) has no bytes
                texts.append(text)
    if not any(texts):
        raise ValueError(f'{file} holds no text: write a JSON object with a "text" on each line')
    return [text for text in texts if text]


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
        if options.is_calibrated:
            raise ValueError(f"--format {options.format} needs a text: --calibration text.jsonl")
        none = torch.empty(0, length, dtype=torch.int64)
        return none, none
    texts, tokenizer = read_texts(file), load_tokenizer(path, EngineConfig(model=str(path)))
    end_id = min(eos_token_ids(path, hf_config, tokenizer), default=0)
    kept = max(1, len(texts) // KEPT)
    parts = []
    for part in (texts[:-kept], texts[-kept:]):
        ids = (id_ for text in part for id_ in (*tokenizer(text, add_special_tokens=False)["input_ids"], end_id))
        parts.append(torch.tensor(list(ids), dtype=torch.int64))
    if min(map(len, parts)) < length:
        raise ValueError(
            f"the calibration text is too short for rows of {length} tokens: it has {len(parts[0])} to calibrate with and "
            f"{len(parts[1])} in its last fifth, which measures the perplexity; add text, or lower --length"
        )
    calibrating, measuring = (part[: len(part) // length * length].view(-1, length) for part in parts)
    return calibrating[: options.samples], measuring[: options.samples]
