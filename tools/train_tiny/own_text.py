"""Rows of text that the shipped model writes itself. `python -m tools.train_tiny.own_text OUT.npy --device cuda`.

A draft guesses behind what its teacher wrote, and at temperature 0 that is not what the grammar draws: where a story may go on
in many ways it goes on in the likeliest one. The first rows are written at temperature 0, and `distil` keeps some of these to
see how often the draft is right.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from .data import IGNORE, pack
from .distil import load_teacher, load_tokenizer
from .documents import SEPARATOR, prompt
from .stories import request_and_story

AT_ONCE = 8192  # answers
LONGEST = 200  # tokens of an answer
END, PAD = 2, 0
Document = tuple[list[int], list[int]]  # ids, labels


@torch.inference_mode()
def answers(teacher: Qwen3ForCausalLM, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    """What the model answers to prompts, each up to its end; tokens."""
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(one)) + one for one in prompts], device=teacher.device)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    mask = (torch.arange(width) >= torch.tensor([[width - len(one)] for one in prompts])).long().to(ids.device)
    written = teacher.generate(ids, attention_mask=mask, max_new_tokens=LONGEST, **drawn)[:, width:].tolist()
    return [one[: one.index(END) + 1] if END in one else one for one in written]


def documents(
    teacher: Qwen3ForCausalLM, tokenizer: Tokenizer, seed: int, number: int, temperature: float
) -> list[Document]:
    """Chats of one turn, about stories: the requests by the grammar, the answers by the model."""
    rng, found = Random(seed), []
    behind = tokenizer.encode("\n" + SEPARATOR).ids
    for start in range(0, number, AT_ONCE):
        asked = [prompt(request_and_story(rng)[0]) for _ in range(min(AT_ONCE, number - start))]
        prompts = [encoding.ids for encoding in tokenizer.encode_batch(asked)]
        for given, written in zip(prompts, answers(teacher, prompts, temperature), strict=True):
            blank = [IGNORE] * len(given), [IGNORE] * len(behind)
            found.append(([*given, *written, *behind], [*blank[0], *written, *blank[1]]))
    return found


def main() -> None:
    """Write the rows, int16 [2, rows, ROW]: ids and labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--greedy", type=int, default=16_384, help="answers at temperature 0")
    parser.add_argument("--drawn", type=int, default=8192, help="answers at temperature 0.8")
    arguments = parser.parse_args()
    teacher, tokenizer, start = load_teacher(arguments.device), load_tokenizer(), time.perf_counter()
    torch.manual_seed(0)
    found = documents(teacher, tokenizer, 1_000, arguments.greedy, 0.0)
    found += documents(teacher, tokenizer, 2_000, arguments.drawn, 0.8)
    rows = np.stack(pack(found, len(found)))
    np.save(arguments.out, rows)
    learned = (rows[1] != IGNORE).sum()
    print(f"{learned:,} tokens of {len(found):,} answers, {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
