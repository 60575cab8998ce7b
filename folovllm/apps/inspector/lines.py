"""The lines of a recording: a header, and then tagged structs. The format is described in docs/reference/recording.md."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from folovllm.engine import events as ev
from folovllm.engine.spelling import BYTE, byte_alphabet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT, VERSION = "folovllm recording", 2
Text = str | list[int]


class Scheduled(ev.Tagged, frozen=True, tag=False):
    """What a recording keeps of a `ScheduledSequence`."""

    seq_id: int
    row: int
    start: int
    end: int
    num_samples: int
    first_new_block: int
    new_blocks: list[int]
    load_state: int = -1  # the snapshot that the step loads; -1: none
    save_state: int = -1


class StepBegan(ev.Tagged, frozen=True):
    """`events.StepBegan`, with what is kept of its sequences."""

    step: int
    start: float
    scheduled: float
    scheduled_seqs: list[Scheduled]
    budget_left: int


class StepEnded(ev.Tagged, frozen=True):
    """`events.StepEnded`, with the tokens that each sequence got."""

    step: int
    start: float
    arrived: float
    end: float
    sampled: list[tuple[int, list[int]]]  # (seq_id, token ids); without sequences that got none
    waiting: int
    kv_blocks_used: int


class DraftsVerified(ev.DraftsVerified, frozen=True):
    """`events.DraftsVerified`, with the token ids that were rejected."""

    rejected: list[int]


class Scored(ev.Tagged, frozen=True):
    """What the model said of every token before one was sampled, for a request that asked for all log-probabilities."""

    seq_id: int
    logprobs: bytes  # [V] float16, by token id


Entry = (
    ev.RequestAdded | ev.Refused | ev.Admitted | ev.PrefixHit | ev.Preempted | ev.Finished | ev.Aborted | ev.ExpertsAsked
    | ev.BlockClaimed | ev.BlockFreed | ev.BlockTaken | ev.BlockAdopted | ev.BlockCached | ev.BlockEvicted | ev.BlockPassed
    | ev.TableFreed | ev.TableCut | ev.SnapshotCached | ev.SnapshotEvicted | ev.BlocksMoved | ev.GivenUp | ev.Snapshot
    | StepBegan | StepEnded | DraftsVerified | Scored
)  # fmt: skip


class Texts(ev.Tagged, frozen=True):
    """What token ids look like, before the first line that needs them."""

    texts: dict[str, Text]


class Turn(ev.Tagged, frozen=True):
    """What happened in one call of the engine's `step`, or from outside."""

    number: int
    time: float  # at which it was handed over
    events: list[Entry]


class Done(ev.Tagged, frozen=True):
    """The end."""

    num_turns: int
    time: float
    how: str


Line = Texts | Turn | Done
encode_lines = msgspec.json.Encoder(
    enc_hook=lambda numbers: numbers.tolist()
).encode_lines  # numpy's, which a learner may hand in


def tokens_of_entry(entry: Entry) -> Iterable[int]:
    """The token ids that an entry shows."""
    match entry:
        case ev.RequestAdded():
            return map(int, entry.prompt_token_ids)
        case StepEnded():
            return (token for _, ids in entry.sampled for token in ids)
        case DraftsVerified():
            return entry.rejected
        case Scored():
            return range(len(entry.logprobs) // 2)
        case ev.Snapshot():
            blocks = np.frombuffer(b"".join([block.token_ids for block in entry.blocks]), np.int32)
            return {*np.unique(blocks).tolist(), *(int(token) for seq in entry.sequences for token in seq.token_ids)}
    return ()


class TokenTexts:
    """The text of each token of a vocabulary, or its bytes where it is no whole character.

    The vocabulary is read once: a tokenizer is not for two threads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = set(tokenizer.all_special_tokens)
        self._pieces = {id_: (piece, piece in special) for piece, id_ in tokenizer.get_vocab().items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes = byte_alphabet() if backend is not None and "ByteLevel" in repr(backend.decoder) else {}

    def of(self, token_ids: Iterable[int]) -> dict[str, Text]:
        """A text for each id that has one."""
        return {str(id_): self._text(*self._pieces[id_]) for id_ in sorted(token_ids) if id_ in self._pieces}

    def _text(self, piece: str, is_special: bool) -> Text:
        if is_special:
            return piece
        if self._bytes and all(letter in self._bytes for letter in piece):
            data = bytes(self._bytes[letter] for letter in piece)
        elif match := BYTE.fullmatch(piece):
            data = bytes([int(match[1], 16)])
        else:
            return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")  # SentencePiece's space
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)
