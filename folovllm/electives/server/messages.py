"""What travels between a server and its engine: commands down, messages up, one `Step` of outputs a step."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from folovllm.request import Request

Row = list[tuple[int, float, int]]  # of one token: (token id, log-probability, rank); the chosen comes first


class Add(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Serve a request. `number` is the server's own name for it, never used twice; its id is the same as text."""

    number: int
    request: Request


class Abort(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Nobody waits for this request any more; it may have ended by itself."""

    number: int


class Stop(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """End, whatever is being served."""


class Call(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Call a method of the engine (`PacedEngine`). The reply is a `Called`; replies come in the order of the calls."""

    method: str
    arguments: list[Any]


class Ready(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The engine is built. `setup` is a pickled `EngineSetup` whose configuration of the model is plain."""

    setup: bytes
    num_kv_blocks: int


class Delta(msgspec.Struct, array_like=True, frozen=True):
    """What a step added to one answer: tokens, and with the last of them its end."""

    number: int
    index: int  # among the `n` answers
    token_ids: list[int] = []
    finish_reason: str | None = None
    num_cached_tokens: int = 0  # of the prompt, found when the answer was begun
    logprobs: list[Row] | None = None  # one row a token
    prompt_logprobs: list[Row] | None = None  # of the prompt's tokens, from its second on, that the step scored


class Refused(msgspec.Struct, array_like=True, frozen=True):
    """A request that the engine did not take, and why."""

    number: int
    message: str


class SchedulerStats(msgspec.Struct, array_like=True):
    """The engine after a step; what is counted, is counted since its start."""

    num_waiting: int = 0
    num_running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    num_preemptions: int = 0
    prefix_tokens: int = 0  # asked of the prefix cache
    prefix_tokens_hit: int = 0
    num_drafts: int = 0  # drafts that were verified
    num_draft_tokens: int = 0
    num_accepted: int = 0
    moved: dict[str, int] = msgspec.field(default_factory=dict)  # blocks of K/V, by what happened and where


class Step(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """All that one turn of the engine's loop has to say."""

    deltas: list[Delta]
    stats: SchedulerStats
    refused: list[Refused] = []
    queue_times: list[float] = []  # seconds in the queue of each sequence that this step let in for the first time


class Seen(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Pieces of the recording. One that begins with a header is a new beginning, where readers may join."""

    pieces: list[bytes]


class Called(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What a `Call` returned, or the sentence of its ValueError; and whether the engine sleeps now."""

    value: Any = None
    error: str | None = None
    is_sleeping: bool = False


class Failure(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The engine has ended. It says nothing more."""

    message: str
    is_user_error: bool = False  # a ValueError while it was built, whose sentence says what to do


NOT_SENT = 'the configuration, or a proposer in it, does not exist in the engine\'s process: take transport="thread"'
Work = Add | Abort | Stop  # for the engine's loop; its link makes the calls itself
Command = Work | Call
EngineMessage = Ready | Step | Seen | Called | Failure

encode = msgspec.msgpack.Encoder(enc_hook=lambda number: number.item()).encode  # NumPy's numbers are numbers too
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_message = msgspec.msgpack.Decoder(EngineMessage).decode

_LENGTH = struct.Struct("<I")


def frame(payload: bytes) -> bytes:
    """A message as it is written to a socket: its length, then itself."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Cuts a stream of bytes into messages again, however it was torn."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take in a piece of the stream, and yield the messages that are whole now, in order, each as `bytes` of its own.

        A message is its length in four bytes (`_LENGTH`), then itself: `frame` makes it. A piece may hold several, or a part
        of one, and may end within a length. What is not whole stays in `self._buffer`. A message leaves it before it is handed
        out, so a reader that fails over one does not get it again; those behind it stay, and come with the next piece. What
        waits in the buffer is not copied.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if end > len(self._buffer):
                break
            message = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield message
