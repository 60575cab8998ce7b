"""A text for the quantizer: most of it shows what inputs look like, the end of it is kept for the perplexity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from folovllm.models.files import reading

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


def split_rows(
    texts: list[str], tokenizer: Any, samples: int, length: int, end_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of tokens to calibrate with [n, length], at most `samples`; and others [m, length] that only measure.

    The last fifth of the texts measures. Each part is joined, with `end_id` behind each text, and cut into rows.

    Raises:
        ValueError: one of the parts does not fill a row.
    """
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
    calibration, measuring = (part[: len(part) // length * length].view(-1, length) for part in parts)
    return calibration[:samples], measuring[:samples]
