"""From events to the lines of a recording. The format is described in docs/reference/recording.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from folovllm import events as ev
from folovllm.spelling import BYTE, byte_alphabet
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput
from folovllm.watcher import Watcher

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT, VERSION = "folovllm recording", 1
KEY_EVERY = 256  # turns
Line = list[Any]
Name = tuple[int, str, int, int]  # block, hash, serial, parent's serial
Text = str | list[int]

# Events whose entry is a name and then the event's fields,
PLAIN: dict[type, str] = {
    ev.Refused: "refuse", ev.PrefixHit: "hit", ev.Admitted: "admit", ev.Preempted: "preempt", ev.Finished: "finish",
    ev.Aborted: "abort", ev.BlockAdopted: "adopt", ev.BlockPassed: "pass", ev.TableCut: "cut",
    ev.SnapshotCached: "snapshot", ev.SnapshotEvicted: "drop",
}  # fmt: skip
# and those whose entry is a name and then the blocks of all that follow one another.
BLOCKS: dict[type, str] = {
    ev.BlockClaimed: "claim", ev.BlockTaken: "take", ev.BlockFreed: "free", ev.BlockEvicted: "evict",
}  # fmt: skip

encode = msgspec.json.Encoder(enc_hook=lambda number: number.item()).encode  # a learner may hand in numpy's numbers


class LineWriter:
    """Turns one engine's events into lines, one batch of them (a turn) after the other.

    It keeps the state that any reader of the lines has. So an entry that says nothing new is one number, and a keyframe asks
    the engine nothing. It may run in a thread of its own.
    """

    def __init__(self, header: dict[str, Any], texts: TokenTexts, epoch: float, key_every: int = KEY_EVERY) -> None:
        """`header` is the first line, `epoch` the clock at time 0 of the recording. `key_every` 0: no more keyframes."""
        self.num_turns = 0
        self._header, self._texts, self._epoch, self._key_every = header, texts, epoch, key_every
        self._state = Watcher()
        self._named: dict[
            int, Name
        ] = {}  # by block; kept, since a large cache has too many to format for each keyframe
        self._known: set[int] = set()  # token ids whose texts are written
        self._new: set[int] = set()  # token ids that the next line needs
        self._turn: list[Line] = []

    def lines(self, events: SequenceOf[ev.Event], time: float) -> Iterator[bytes]:
        """The lines of one batch that was handed over at `time`.

        A `Snapshot` gives a header and a keyframe that has all: the beginning of the recording, or later on a beginning
        for those who join.
        """
        at = self._at(time)
        if events and isinstance(events[0], ev.Snapshot):
            yield from self._begin(events[0], at)
            events = events[1:]
            if not events:
                return
        elif self._key_every and self.num_turns % self._key_every == 0 and self.num_turns:
            yield encode(["key", self.num_turns, at, keyframe(self._state, self._named, self._at)])
        self._turn = []
        for event in events:
            if (entry := self._entry(event)) is not None:
                self._turn.append(entry)
            self._state.apply(event)
        yield from self._new_texts()
        yield encode(["turn", self.num_turns, at, self._turn])
        self.num_turns += 1

    def done(self, how: str, time: float) -> bytes:
        """The last line."""
        return encode(["done", self.num_turns, self._at(time), how])

    def _at(self, time: float) -> int:
        return round((time - self._epoch) * 1e6)

    def _new_texts(self) -> Iterator[bytes]:
        if new := self._new - self._known:
            self._known |= new
            yield encode(["texts", self._texts.of(new)])
        self._new.clear()

    def _begin(self, snapshot: ev.Snapshot, at: int) -> Iterator[bytes]:
        """Header, all texts so far and a keyframe with all tokens."""
        self._new |= self._known
        self._known.clear()
        self._state.apply(snapshot)
        self._named = {
            b.block_id: (b.block_id, f"{b.hash:016x}", b.serial, b.parent)
            for b in snapshot.blocks
            if b.hash is not None
        }
        block_tokens, different = tokens_of(snapshot.blocks)
        tokens = {str(seq.added.seq_id): list(seq.token_ids) for seq in snapshot.sequences}
        self._new.update(different, *tokens.values())
        yield encode(self._header)
        yield from self._new_texts()
        state = keyframe(self._state, self._named, self._at) | {"tokens": tokens, "block_tokens": block_tokens}
        yield encode(["key", self.num_turns, at, state])

    def _entry(self, event: ev.Event) -> Line | None:
        """The entry of an event; None if the entry before it says it, too, or it is not drawn."""
        if (name := PLAIN.get(type(event))) is not None:
            return [name, *event]
        match event:
            case ev.BlockClaimed(block_id) | ev.BlockTaken(block_id) | ev.BlockFreed(block_id):
                return self._join(BLOCKS[type(event)], block_id)
            case ev.BlockEvicted(block_id):
                self._named.pop(block_id, None)
                return self._join("evict", block_id)
            case ev.BlockCached(block_id, seq_id, place, hash_, serial, parent):
                named = self._named[block_id] = (block_id, f"{hash_:016x}", serial, parent)
                return ["publish", block_id, seq_id, place, *named[1:]]
            case ev.StepBegan(step, start, scheduled, output, budget_left):
                entries, states = self._scheduled(output.scheduled_seqs), self._states(output)
                return [
                    "begin",
                    step,
                    self._at(start),
                    self._at(scheduled),
                    entries,
                    budget_left,
                    *([states] if states else []),
                ]
            case ev.StepEnded(step, start, arrived, end, output, result, waiting, used):
                pairs = zip(output.scheduled_seqs, result.token_ids, strict=True)
                sampled = [(scheduled.seq_id, ids) for scheduled, ids in pairs if ids]
                self._new.update(*[ids for _, ids in sampled])
                tokens = [ids[0] if len(ids) == 1 else ids for _, ids in sampled]
                seqs, times = [seq_id for seq_id, _ in sampled], [self._at(start), self._at(arrived), self._at(end)]
                return ["end", step, *times, seqs, tokens, waiting, used]
            case ev.TableFreed(seq_id, held):
                left = [ref_count for _, ref_count in held]
                return ["table", seq_id, [block_id for block_id, _ in held], *([left] if any(left) else [])]
            case ev.DraftsVerified(seq_id, _, num_accepted):
                rejected = self._state.served(seq_id).drafts[num_accepted:].tolist()
                self._new.update(rejected)
                return ["guess", *event, rejected]
            case ev.ExpertsAsked(counts):
                return ["experts", [list(layer) for layer in counts]]
            case ev.RequestAdded(seq_id, request_id, answer, token_ids, max_tokens, priority, time):
                prompt = list(token_ids)
                self._new.update(prompt)
                return ["add", seq_id, request_id, answer, prompt, max_tokens, priority, self._at(time)]
        return None

    def _scheduled(self, scheduled_seqs: Iterable[ScheduledSequence]) -> list[int | Line]:
        """The entries of a step's sequences: a bare number where it says all. Hundreds a step come here, so it is one loop."""
        entries: list[int | Line] = []
        sequences = self._state.sequences
        for seq_id, _, start, end, _, blocks, first, num_samples, *_ in scheduled_seqs:
            seq, n = sequences.get(seq_id), end - start
            if seq is None or blocks or first < len(seq.block_table):
                entries.append([seq_id, start, n, num_samples, first, blocks])
            elif n == 1 == num_samples and start == seq.num_computed_tokens:
                entries.append(seq_id)
            else:
                entries.append([seq_id, start, n, num_samples])
        return entries

    def _states(self, output: SchedulerOutput) -> list[Line]:
        """The row of each sequence that has a new one, with the snapshots that a step loads and saves; of a model with states."""
        if not self._header["engine"].get("state_tokens"):
            return []
        row_of = {seq_id: seq.row for seq_id, seq in self._state.sequences.items()}
        copies = {i: own for i, *own in (output.extras or {})["states"].tolist()} if output.extras else {}
        return [
            [each.seq_id, each.row, *copies.get(i, [-1, -1])]
            for i, each in enumerate(output.scheduled_seqs)
            if i in copies or each.row != row_of.get(each.seq_id)
        ]

    def _join(self, name: str, block_id: int) -> Line | None:
        """Add a block to the entry before, if that has the same name; else return an entry of its own."""
        last = self._turn[-1] if self._turn else [None]
        if name == "take" and last[0] == "claim" and last[-1] == block_id:  # one entry says both, as nearly always
            last.pop()
            if len(last) == 1:
                self._turn.pop()
            return self._join("new", block_id)
        if last[0] != name:
            return [name, block_id]
        last.append(block_id)
        return None


def keyframe(state: Watcher, named: dict[int, Name], at: Callable[[float], int]) -> dict[str, Any]:
    """The whole state as a keyframe has it. `named` has the entries of cached blocks, `at` turns the clock's time into the recording's."""
    sequences = []
    for seq in state.sequences.values():
        seq_id, request_id, answer, prompt, max_tokens, priority, time = seq.added
        head = [seq_id, request_id, answer, len(prompt), max_tokens, priority, at(time)]
        state_of_it = [int(seq.is_running), seq.num_tokens, seq.num_computed_tokens, seq.block_table, seq.refused]
        sequences.append(head + state_of_it)
    return {
        "steps": state.num_steps,
        "free": "".join(["1" if cell.is_free else "0" for cell in state.cells]),
        "refs": [cell.ref_count for cell in state.cells],
        "named": list(named.values()),
        "sequences": sequences,
    }


def tokens_of(blocks: SequenceOf[ev.BlockState]) -> tuple[dict[str, list[int]], list[int]]:
    """The tokens of each block that has a hash, and all different ones. There may be a million: no loop over tokens."""
    cached = [block for block in blocks if block.hash is not None]
    ids = np.frombuffer(b"".join([block.token_ids for block in cached]), np.int32)
    numbers, found, start = ids.tolist(), dict[str, list[int]](), 0
    for block in cached:
        end = start + len(block.token_ids) // ids.itemsize
        found[str(block.block_id)] = numbers[start:end]
        start = end
    is_there = np.zeros(ids.max(initial=-1) + 1, bool)  # to sort a million takes 50 times as long
    is_there[ids] = True
    return found, np.flatnonzero(is_there).tolist()


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


def as_file(lines: Iterable[bytes]) -> bytes:
    """Lines as they stand in a file."""
    return b"".join(line + b"\n" for line in lines)
