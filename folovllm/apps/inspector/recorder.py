"""A listener that writes a recording, in a thread of its own: the engine's loop only hands over what happened."""

from __future__ import annotations

import datetime
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from folovllm.apps.inspector import lines
from folovllm.engine import events as ev
from folovllm.engine.spelling import BYTE, byte_alphabet
from folovllm.models.model_config import num_linear_of
from folovllm.step.schedule import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from folovllm.engine.llm_engine import LLMEngine

MOST_WAITING = 1024  # batches that the thread may be behind; then the engine waits for it
Batch = tuple[SequenceOf[ev.Event], float]


class Recorder:
    """Listens to an engine from now on, and hands the lines of its recording to `write`, as UTF-8.

    `write` is called in the recorder's thread. What it raises ends the recording and not the engine: `close` raises it.
    """

    def __init__(
        self,
        engine: LLMEngine,
        write: Callable[[bytes], object],
        *,
        title: str = "",
        texts: TokenTexts | None = None,
        **about: Any,
    ) -> None:
        """`about` is what the header says besides: `scene`, and None for `started` where the engine reads a made-up clock."""
        self._engine, self._write = engine, write
        self._queue: queue.Queue[Batch | None] = queue.Queue(MOST_WAITING)
        self._error: Exception | None = None
        self._header = header_of(engine, title) | about
        self._texts = TokenTexts(engine.tokenizer) if texts is None else texts
        self._known: set[int] = set()  # token ids whose texts are written
        self._drafts: dict[int, TokenIds] = {}  # by seq_id: the newest step's, which are known when they are verified
        self._num_turns = 0
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self._thread.start()
        engine.subscribe(self, experts=True)

    def __call__(self, events: SequenceOf[ev.Event]) -> None:
        """Queue what happened for the thread. Waits only if it is far behind."""
        self._queue.put((events, time.monotonic()))

    def begin_again(self) -> None:
        """Write a beginning for those who join now: header, texts, and a keyframe that has all."""
        self._engine.unsubscribe(self)
        self._engine.subscribe(self, experts=True)

    def wait(self) -> None:
        """Wait until all that happened so far is written."""
        self._queue.join()

    def close(self, how: str = "closed") -> None:
        """Write what is left, and the end. A second call does nothing. Raises OSError if something could not be written."""
        if not self._thread.is_alive():
            return
        self._engine.unsubscribe(self)
        now = time.monotonic()
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._write(lines.encode_lines([lines.Done(self._num_turns, now, how)]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close. The recording says with which error the block ended."""
        self.close("closed" if error is None else f"{type(error).__name__}: {error}".rstrip(": "))

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._write(lines.encode_lines(self._lines(*batch)))
                except Exception as error:  # of a full disk, say: the engine goes on
                    self._error = error
            self._queue.task_done()

    def _lines(self, events: SequenceOf[ev.Event], time: float) -> Iterator[Any]:
        """The lines of one batch (a turn). A `Snapshot` gives a header before it, and all texts anew: a reader may join there."""
        if isinstance(events[0], ev.Snapshot):
            self._known.clear()
            yield self._header
        entries = [entry for event in events for entry in self._entries(event)]
        if new := {token for entry in entries for token in tokens_of_entry(entry)} - self._known:
            self._known |= new
            yield lines.Texts(self._texts.of(new))
        yield lines.Turn(self._num_turns, time, entries)
        self._num_turns += 1

    def _entries(self, event: ev.Event) -> Iterator[Any]:
        """The event as it is written; before the end of a step, what the model said of every token."""
        match event:
            case ev.StepBegan(step, start, scheduled, output, budget_left):
                verified = [s for s in output.scheduled_seqs if s.num_samples > 1]
                self._drafts |= {s.seq_id: s.token_ids[1 - s.num_samples :] for s in verified}
                copies = (output.extras or {}).get("states", np.empty((0, 3), np.int32)).tolist()
                states = {i: (load, save) for i, load, save in copies}
                seqs = [
                    lines.Scheduled(s.seq_id, s.row, s.start, s.end, s.num_samples, s.first_new_block, list(s.new_blocks), *states.get(i, ()))
                    for i, s in enumerate(output.scheduled_seqs)
                ]  # fmt: skip
                yield lines.StepBegan(step, start, scheduled, seqs, budget_left)
            case ev.StepEnded(step, start, arrived, end, output, result, waiting, used):
                for i, rows in result.logprobs.items():
                    ids = [id_ for id_, _, _ in rows[-1]] if rows else []
                    if len(ids) > 1 + max(ids, default=0):  # the sampled token, and then all of the vocabulary
                        values = np.empty(len(ids) - 1, np.float16)
                        values[ids] = [value for _, value, _ in rows[-1]]
                        yield lines.Scored(output.scheduled_seqs[i].seq_id, values.tobytes())
                yield lines.StepEnded(step, start, arrived, end, event.sampled, waiting, used)
            case ev.DraftsVerified(seq_id, num_draft_tokens, num_accepted):
                drafts = self._drafts.pop(seq_id, np.empty(0, np.int32))
                yield lines.DraftsVerified(seq_id, num_draft_tokens, num_accepted, drafts[num_accepted:].tolist())
            case _:
                yield event


def tokens_of_entry(entry: lines.Entry) -> Iterable[int]:
    """The token ids that an entry shows."""
    match entry:
        case ev.RequestAdded():
            return map(int, entry.prompt_token_ids)
        case lines.StepEnded():
            return (token for _, ids in entry.sampled for token in ids)
        case lines.DraftsVerified():
            return entry.rejected
        case lines.Scored():
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
        self._names = {id_: name for name, id_ in tokenizer.get_vocab().items()}
        self._special = set(tokenizer.all_special_tokens)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._bytes = byte_alphabet() if backend is not None and "ByteLevel" in repr(backend.decoder) else {}

    def of(self, token_ids: Iterable[int]) -> dict[str, str | list[int]]:
        """A text for each id that has one."""
        return {str(id_): self._text(self._names[id_]) for id_ in sorted(token_ids) if id_ in self._names}

    def _text(self, name: str) -> str | list[int]:
        if name in self._special:
            return name
        if self._bytes.keys() >= {*name}:
            data = bytes(self._bytes[letter] for letter in name)
        elif match := BYTE.fullmatch(name):
            data = bytes([int(match[1], 16)])
        else:
            return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")  # SentencePiece's space
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)


@contextmanager
def recording(engine: LLMEngine, path: str | Path, title: str = "") -> Iterator[Recorder]:
    """Record an engine into a file for as long as the block runs, until Ctrl-C too.

    Raises:
        ValueError: the file cannot be written. That it could not be written to its end is raised after the block.
    """
    try:
        file = open(path, "wb")  # noqa: SIM115 -- closed below
    except OSError as error:
        raise ValueError(f"cannot record into {path}: {error.strerror}. Name a file in a folder with room") from error

    def write(data: bytes) -> None:
        file.write(data)
        file.flush()  # who reads it meanwhile sees whole turns

    with file, Recorder(engine, write, title=title or Path(path).stem) as recorder:
        yield recorder


CONFIGURED = (
    "model", "milestone", "kv_cache", "scheduling", "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling",
)  # fmt: skip
RESOLVED = "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"


def header_of(engine: LLMEngine, title: str) -> dict[str, Any]:
    """The first line of a recording that starts now."""
    setup, config = engine.setup, engine.setup.config
    described: dict[str, Any] = {name: getattr(config, name) for name in CONFIGURED}
    described |= {name: getattr(setup, name) for name in RESOLVED}
    described |= {
        "num_kv_blocks": engine.executor.num_kv_blocks,
        "attention_backend": setup.backend,
        "device": setup.device.type,
        "graph_widths": list(getattr(engine.executor, "graph_widths", ())),  # where steps are packed
        "mine": bool(os.environ.get("FOLOVLLM_MINE")),
    }
    if num_linear_of(setup.hf_config):
        from folovllm.electives.hybrid.state_layer import num_snapshots, state_layers  # a package that may be missing

        layers = state_layers(setup.hf_config, setup.dtype)
        state_bytes = sum(layer.state_bytes for layer in layers) // config.tensor_parallel_size
        described["state_tokens"] = state_bytes // max(1, setup.kv_bytes_per_token)
        described["num_snapshots"] = num_snapshots(setup)
    if "kv_offload" in config.extras:
        described["kv_offload"] = True
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    about = {"holds_prompts": True, "title": title, "started": started, "engine": described}
    return {"format": lines.FORMAT, "version": lines.VERSION} | about
