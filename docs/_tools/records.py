"""`Sequence` and `Block`, field by field: what each says, and who writes it. `excerpts.py` writes the tables into the pages.

A field that is not described here is an error, so that the page keeps up with the code.
"""

from __future__ import annotations

from dataclasses import fields

from folovllm.cache.free_list import Block
from folovllm.request import Sequence

SEQUENCE = {  # in the order in which one meets them; who writes it, and what it says
    "request_id": ("the request", "the name that the user, or the server, gave"),
    "index": ("the request", "which of the `n` answers to one prompt this is"),
    "seq_id": ("the request", "a number of its own; who came earlier has a smaller one"),
    "priority": ("the request", "smaller goes first, where the scheduler heeds it"),
    "prompt_token_ids": ("the request", "the prompt"),
    "params": ("the request", "how to draw, and when to stop"),
    "max_tokens": ("the request", "the longest answer; prompt and answer fit into the context"),
    "seed": ("the request", "of its noise: the same seed draws the same tokens, whoever is beside it"),
    "eos_token_ids": ("the request", "ids that end a text of this model"),
    "bad_words": ("the request", "runs of tokens that the answer must not hold"),
    "num_to_score": (
        "the request",
        "tokens of the prompt whose log-probabilities are wanted: all but the first, or none",
    ),
    "cache_salt": ("the request", "prefixes are shared only between equal salts"),
    "status": ("`start`, `requeue`, `finish`", "WAITING, RUNNING or one of FINISHED_*: see below"),
    "num_tokens": ("`append_token`", "prompt and answer so far"),
    "_token_ids": ("`append_token`", "these tokens, in an array with room for the longest answer"),
    "num_computed_tokens": (
        "the scheduler",
        "tokens whose K/V is in the cache, or is being computed in a step that was sent",
    ),
    "num_in_flight": ("the loop (M6)", "tokens that a step was sent for and that have not come back"),
    "block_table": (
        "the cache manager",
        "blocks in order: token `i` is in block `block_table[i // B]`, at place `i % B`",
    ),
    "prefix": ("the prefix cache (M5)", "its own notes: hashes of full blocks, and how much it found"),
    "stop_reason": ("the stop rule", "the stop string or token id that ended the answer"),
    "detokenizer": ("the output processor", "the text so far, and the bytes that are no character yet"),
    "prompt_logprobs": ("the engine", "log-probabilities of these tokens, as far as they have come"),
    "logprobs": ("the engine", "log-probabilities of the drawn tokens, where the request asked for them"),
}
BLOCK = {
    "block_id": ("nobody", "its place in the cache's tensors, from 0"),
    "ref_count": ("the block manager", "how many block tables name it; 0 means that it is in the free list"),
    "hash": ("the prefix cache (M5)", "its name, once it is full: of its tokens and of the block before it"),
    "token_ids": ("the prefix cache", "its tokens as bytes: a hit must have the same, for hashes can collide"),
    "serial": ("the prefix cache", "the number of this publication; each gets a new one"),
    "parent": ("the prefix cache", "the serial of the block before it; 0 for a first block"),
    "_previous": ("the free list", "neighbour in the list of free blocks: freed earlier"),
    "_next": ("the free list", "neighbour on the other side: freed later"),
}


def sequence_table() -> str:
    """The fields of `Sequence`."""
    return _table(Sequence, SEQUENCE)


def block_table() -> str:
    """The fields of `Block`."""
    return _table(Block, BLOCK)


def _table(record: type, described: dict[str, tuple[str, str]]) -> str:
    names = {field.name for field in fields(record)}  # type: ignore[arg-type]
    if wrong := names ^ set(described):
        raise ValueError(f"docs/_tools/records.py and {record.__name__} differ in {', '.join(sorted(wrong))}")
    rows = ["| field | written by | what it says |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {who} | {what} |" for name, (who, what) in described.items())])
