"""Batches: document i comes from a generator seeded with (seed, i), so any worker can make any batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from random import Random
from threading import Event, Semaphore

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .documents import END, SEPARATOR, Piece, document, prompt
from .stories import request_and_story

IGNORE = -100
ROW = 1024  # tokens a row
AHEAD = 8  # batches of each worker
DOCUMENTS_PER_BATCH = 1_000_000  # spacing of document indices: more than any batch uses
Batch = tuple[NDArray[np.int16], NDArray[np.int16]]  # ids, labels: both [rows, ROW]


def encode(tokenizer: Tokenizer, pieces: list[Piece]) -> tuple[list[int], list[int]]:
    """Ids of a document, and labels: the ids the model learns to write, IGNORE elsewhere."""
    ids: list[int] = []
    labels: list[int] = []
    for encoding, (_, learn) in zip(tokenizer.encode_batch([text for text, _ in pieces]), pieces, strict=True):
        ids += encoding.ids
        labels += encoding.ids if learn else [IGNORE] * len(encoding.ids)
    return ids, labels


def make_batch(tokenizer: Tokenizer, seed: int, index: int, rows: int, held_out: bool = False) -> Batch:
    """Batch `index` of the text that goes with `seed`, [rows, ROW] both."""
    generators = (Random(seed * 2**40 + number) for number in count(index * DOCUMENTS_PER_BATCH))
    make = held_out_document if held_out else document
    return pack((encode(tokenizer, make(rng)) for rng in generators), rows)


def pack(documents: Iterable[tuple[list[int], list[int]]], rows: int) -> Batch:
    """Rows of whole documents, given as ids and labels; what is left of a row is filled with the separator, which has id 0.

    There are fewer rows if the documents do not fill as many.
    """
    ids = np.zeros((rows, ROW), dtype=np.int16)
    labels = np.full((rows, ROW), IGNORE, dtype=np.int16)
    row, start = 0, 0
    for new_ids, new_labels in documents:
        if len(new_ids) > ROW:
            continue  # four long turns, one document in ten thousand
        if start + len(new_ids) > ROW:
            row, start = row + 1, 0
        if row == rows:
            return ids, labels
        ids[row, start : start + len(new_ids)] = new_ids
        labels[row, start : start + len(new_ids)] = new_labels
        start += len(new_ids)
    return ids[: row + 1], labels[: row + 1]


def held_out_document(rng: Random) -> list[Piece]:
    """A request for a combination that no training document has."""
    question, story, _ = request_and_story(rng, "name stated noun color adjective", evaluation=True)
    return [(prompt(question), False), (story + END, True), (SEPARATOR, False)]


def batches(folder: Path, seed: int, rows: int, steps: int, workers: int) -> Iterator[Batch]:
    """The batches of a run, in order, made by `workers` processes ahead of the trainer: so many, and then they wait for it."""
    room, ended = Semaphore(AHEAD * workers), Event()

    def asked() -> Iterator[int]:
        for step in range(steps):
            room.acquire()
            if ended.is_set():
                return
            yield step

    with get_context("spawn").Pool(workers, _start_worker, (folder, seed, rows)) as pool:
        try:
            for batch in pool.imap(_work, asked()):
                room.release()
                yield batch
        finally:  # the pool ends when its thread does that asks
            ended.set()
            room.release()


def _start_worker(folder: Path, seed: int, rows: int) -> None:
    global _arguments
    _arguments = (Tokenizer.from_file(str(folder / "tokenizer.json")), seed, rows)


def _work(index: int) -> Batch:
    tokenizer, seed, rows = _arguments
    return make_batch(tokenizer, seed, index, rows)
