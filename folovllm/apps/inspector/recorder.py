"""A listener that writes a recording, in a thread of its own: the engine's loop only hands over what happened."""

from __future__ import annotations

import datetime
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from folovllm.apps.inspector.lines import (
    FORMAT,
    VERSION,
    Done,
    DraftsVerified,
    Scheduled,
    Scored,
    StepBegan,
    StepEnded,
    Texts,
    TokenTexts,
    Turn,
    encode_lines,
    tokens_of_entry,
)  # fmt: skip
from folovllm.engine import events as ev
from folovllm.models.model_config import num_linear_of
from folovllm.step.schedule import TokenIds

if TYPE_CHECKING:
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
        is_virtual: bool = False,
        texts: TokenTexts | None = None,
        scene: dict[str, Any] | None = None,
    ) -> None:
        """`is_virtual`: the engine reads a made-up clock, so the header has no date. `scene` is what the header says of one."""
        self._engine, self._write = engine, write
        self._queue: queue.Queue[Batch | None] = queue.Queue(MOST_WAITING)
        self._error: Exception | None = None
        started = None if is_virtual else datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._header = header_of(engine, title, started) | ({} if scene is None else {"scene": scene})
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
        self._write(encode_lines([Done(self._num_turns, now, how)]))

    def _work(self) -> None:
        while (batch := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._write(encode_lines(self._lines(*batch)))
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
            yield Texts(self._texts.of(new))
        yield Turn(self._num_turns, time, entries)
        self._num_turns += 1

    def _entries(self, event: ev.Event) -> Iterator[Any]:
        """The event as it is written; before the end of a step, what the model said of every token."""
        match event:
            case ev.StepBegan(step, start, scheduled, output, budget_left):
                copies = (output.extras or {}).get("states", np.empty((0, 3), np.int32)).tolist()
                snapshots = {i: (load, save) for i, load, save in copies}
                seqs = [
                    Scheduled(s.seq_id, s.row, s.start, s.end, s.num_samples, s.first_new_block, list(s.new_blocks), *snapshots.get(i, ()))
                    for i, s in enumerate(output.scheduled_seqs)
                ]  # fmt: skip
                verified = [s for s in output.scheduled_seqs if s.num_samples > 1]
                self._drafts |= {s.seq_id: s.token_ids[1 - s.num_samples :] for s in verified}
                yield StepBegan(step, start, scheduled, seqs, budget_left)
            case ev.StepEnded(step, start, arrived, end, output, result, waiting, used):
                for i, rows in result.logprobs.items():
                    ids = [id_ for id_, _, _ in rows[-1]] if rows else []
                    if len(ids) > 1 + max(ids, default=0):  # the sampled token, and then all of the vocabulary
                        values = np.empty(len(ids) - 1, np.float16)
                        values[ids] = [value for _, value, _ in rows[-1]]
                        yield Scored(output.scheduled_seqs[i].seq_id, values.tobytes())
                yield StepEnded(step, start, arrived, end, event.sampled, waiting, used)
            case ev.DraftsVerified(seq_id, num_draft_tokens, num_accepted):
                drafts = self._drafts.pop(seq_id, np.empty(0, np.int32))
                yield DraftsVerified(seq_id, num_draft_tokens, num_accepted, drafts[num_accepted:].tolist())
            case _:
                yield event


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

    with file:
        recorder = Recorder(engine, write, title=title or Path(path).stem)
        try:
            yield recorder
        except BaseException as error:
            recorder.close(f"{type(error).__name__}: {error}".rstrip(": "))
            raise
        recorder.close()


CONFIGURED = "model", "milestone", "kv_cache", "scheduling"
SWITCHES = "enable_prefix_caching", "enable_chunked_prefill", "async_scheduling"
RESOLVED = "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"


def header_of(engine: LLMEngine, title: str, started: str | None) -> dict[str, Any]:
    """The first line of a recording."""
    setup, config = engine.setup, engine.setup.config
    described = {name: getattr(config, name) for name in CONFIGURED + SWITCHES} | {
        name: getattr(setup, name) for name in RESOLVED
    }
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
    about = {"holds_prompts": True, "title": title, "started": started, "engine": described}
    return {"format": FORMAT, "version": VERSION} | about
