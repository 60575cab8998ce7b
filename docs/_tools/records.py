"""`Request`, `Sequence` and `Block`, field by field: what each says, and who writes it.

`excerpts.py` writes the tables into the pages.

A field without a description here is an error: so the page keeps up with the code.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from folovllm.cache.block_manager import Block
from folovllm.request import Request, Sequence

REQUEST = {  # in the order in which a reader meets them: what each field says; nothing changes a request
    "request_id": "the name that the user, or the server, gave",
    "prompt": "the text, if the prompt came as one",
    "prompt_token_ids": "the prompt",
    "params": "how to sample, and when to stop",
    "max_tokens": "the longest answer; prompt and answer fit into the context",
    "seed": "the same seed samples the same tokens in every batch; the first answer takes it, the others derive theirs",
    "eos_token_ids": "ids that end a text of this model",
    "bad_words": "runs of tokens that the answer must not hold",
    "priority": "smaller goes first, where the scheduler heeds it",
    "cache_salt": "prefixes are shared only between equal salts",
}
SEQUENCE = {  # the same order; who writes each field, and what it says
    "request": ("the input processor", "what was asked for; all answers to one prompt share it"),
    "request_id": ("the sequence itself", "the request's, as the next three: each is read several times a token"),
    "params": ("the sequence itself", "how to sample, and when to stop"),
    "max_tokens": ("the sequence itself", "the longest answer; prompt and answer fit into the context"),
    "eos_token_ids": ("the sequence itself", "ids that end a text of this model"),
    "index": ("the input processor", "which of the `n` answers to the prompt this is"),
    "seq_id": ("the sequence itself", "a number of its own; an earlier sequence has a smaller one"),
    "status": ("`start`, `requeue`, `finish`", "WAITING, RUNNING or one of FINISHED_*: see below"),
    "num_prompt_tokens": ("the sequence itself", "tokens of the prompt"),
    "num_tokens": ("`append_token`", "prompt and answer so far"),
    "num_output_tokens": ("`append_token`", "tokens of the answer so far"),
    "last_token": ("`append_token`", "the newest token of the answer"),
    "_token_ids": ("`append_token`", "these tokens, in an array with room for the longest answer"),
    "num_computed_tokens": (
        "the scheduler",
        "tokens whose K/V is in the cache, or is being computed in a step that was sent",
    ),
    "block_table": (
        "the cache manager",
        "blocks in order: token `i` is in block `block_table[i // B]`, at place `i % B`",
    ),
    "prefix": ("the prefix cache (M5)", "its own notes: hashes of full blocks, and how much it found"),
    "stop_reason": ("the stop rule", "the stop string or token id that ended the answer"),
    "detokenizer": ("the scheduler, the output processor", "the text so far, and the bytes that are no character yet"),
    "logprobs": ("the engine", "log-probabilities of the sampled tokens, where the request asked for them"),
    "prompt_logprobs": ("the engine", "the same of the prompt's tokens but the first, as far as they have come"),
}
BLOCK = {
    "block_id": ("nobody", "its place in the cache's tensors, from 0"),
    "ref_count": ("the block manager", "how many block tables name it; 0 means that it is in the free list"),
    "hash": ("the prefix cache (M5)", "its name, once it is full: of its tokens and of the block before it"),
    "token_ids": ("the prefix cache", "its tokens as bytes: a hit must have the same, for hashes can collide"),
    "serial": ("the prefix cache", "the number of this publication; each gets a new one"),
    "parent": ("the prefix cache", "the serial of the block before it; 0 for a first block"),
}


def request_table() -> str:
    """The fields of `Request`."""
    _check(Request, REQUEST)
    rows = ["| field | what it says |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {what} |" for name, what in REQUEST.items())])


def sequence_table() -> str:
    """The fields of `Sequence`."""
    return _table(Sequence, SEQUENCE)


def block_table() -> str:
    """The fields of `Block`."""
    return _table(Block, BLOCK)


def _table(record: type, described: dict[str, tuple[str, str]]) -> str:
    _check(record, described)
    rows = ["| field | written by | what it says |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {who} | {what} |" for name, (who, what) in described.items())])


def _check(record: type, described: Collection[str]) -> None:
    names = {field.name for field in fields(record)}  # type: ignore[arg-type]
    if wrong := names ^ set(described):
        raise ValueError(f"docs/_tools/records.py and {record.__name__} differ in {', '.join(sorted(wrong))}")
