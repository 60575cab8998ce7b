"""What travels between a server and its engine: commands down, messages up, one `Step` of outputs a step."""

from __future__ import annotations

import logging
import struct
from collections.abc import Collection, Iterator
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


class Watch(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Begin a recording of what the engine does, or end it. Said again, `is_on` begins it anew."""

    is_on: bool


class Pace(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """How fast to go, so that a reader can follow: seconds between steps; if held, `step` more steps may be taken."""

    delay: float = 0.0
    is_held: bool = False
    step: int = 0


class Call(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Call the function at `place` ("module:function") with the engine and a query. The answer is a `Called`, in order."""

    place: str
    query: dict[str, str]


class AskExperts(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """How often was each expert asked? The answer is an `ExpertLoad`."""


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
    """A request that the engine did not take or could not finish, and why."""

    number: int
    message: str
    is_fault: bool = False  # of the server; else the request asks for what cannot be


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


class Step(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """All that one turn of the engine's loop has to say."""

    deltas: list[Delta]
    stats: SchedulerStats
    refused: list[Refused] = []
    queue_times: list[float] = []  # seconds in the queue of each sequence that this step let in for the first time


class Seen(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Pieces of the recording. One that begins with a header is a new beginning, where readers may join."""

    pieces: list[bytes]


class ExpertLoad(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """How often each expert of each layer, [L][E], was asked since the start."""

    counts: list[list[int]]


class Called(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What a `Call` returned, or the sentence of its ValueError."""

    value: Any = None
    error: str | None = None


class Failure(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """The engine has ended. It says nothing more."""

    message: str
    is_user_error: bool = False  # a ValueError while it was built, whose sentence says what to do


logger = logging.getLogger("folovllm")
NOT_SENT = 'the configuration, or a proposer in it, does not exist in the engine\'s process: take transport="thread"'
Work = Add | Abort | Stop | Refused  # the last: an `Add` that could not be read
Command = Add | Abort | Stop | Watch | Pace | AskExperts | Call
EngineMessage = Ready | Step | Seen | ExpertLoad | Called | Failure

encode = msgspec.msgpack.Encoder(enc_hook=lambda number: number.item()).encode  # NumPy's numbers are numbers too
_decode_command = msgspec.msgpack.Decoder(Command).decode
decode_message = msgspec.msgpack.Decoder(EngineMessage).decode


class RequestFailed(RuntimeError):
    """Requests ran into faults of their own and were ended; the log has each fault. All others go on."""

    def __init__(self, numbers: Collection[str]) -> None:
        super().__init__(f"the engine failed at request {', '.join(numbers)}, and its log says how")
        self.numbers = numbers


def log_fault(number: object, error: BaseException) -> None:
    """Log that a request failed. Raises what cannot be its fault, as KeyboardInterrupt; a panic in a library's Rust is one."""
    if not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
        raise error
    logger.error("request %s failed", number, exc_info=error)


def failure_of(number: int, error: BaseException) -> Refused:
    """Log a fault of one request, and return what its sender is told."""
    log_fault(number, error)
    return Refused(number, str(RequestFailed([str(number)])), is_fault=True)


def decode_command(message: bytes) -> Command | Refused:
    """The command in a message; of an `Add` that cannot be read, its refusal. Raises ValueError if it is no command at all."""
    try:
        return _decode_command(message)
    except BaseException as error:
        kind, number, *_ = msgspec.msgpack.decode(message)
        if kind != Add.__name__:
            raise
        return failure_of(number, error)


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
        out, so a reader that fails over one does not get it again. What waits in the buffer is not copied.
        """
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if end > len(self._buffer):
                break
            message = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield message
