"""Messages out of a stream of bytes, which arrives in pieces that nobody chose."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.server.messages import Frames, frame
from tests.tiny import worked_case


class Counted(bytearray):
    """A buffer that counts the bytes that are copied out of it, and out of its slices."""

    count: ClassVar[int] = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if not isinstance(key, slice):
            return found
        Counted.count += len(found)
        return Counted(found)

    def __bytes__(self) -> bytes:
        Counted.count += len(self)
        return bytes(memoryview(self))

    def __add__(self, other: Any) -> bytearray:
        Counted.count += len(self)
        return super().__add__(other)


class TestFrames:
    def test_a_worked_case(self) -> None:
        """Three messages, "hey", an empty one and "you": 4 + 3, 4 and 4 + 3 bytes, in pieces of 2, 4, 5 and 7 bytes."""
        stream = b"\x03\0\0\0hey" + b"\0\0\0\0" + b"\x03\0\0\0you"
        frames, got = Frames(), {}
        for start, end in ((0, 2), (2, 6), (6, 11), (11, 18)):
            piece = stream[start:end]
            got[f"bytes {start} to {end}, {piece!r}"] = [bytes(m).decode() for m in frames.feed(piece)]
        says = (
            "a message is there when all of its bytes are: 7 bytes for the first, 11 for the second, 18 for the third"
        )
        worked_case("x1.2", got, dict(zip(got, [[], [], ["hey", ""], ["you"]], strict=True)), says)

    def test_a_piece_may_hold_several(self) -> None:
        pieces = list(Frames().feed(frame(b"one") + frame(b"two") + frame(b"three")))
        assert pieces == [b"one", b"two", b"three"], "all that is whole comes at once, in order"

    def test_a_byte_at_a_time(self) -> None:
        """The length itself may be torn."""
        frames = Frames()
        got = [m for byte in frame(b"ab") + frame(b"c") for m in frames.feed(bytes([byte]))]
        assert got == [b"ab", b"c"], "after the last byte of each message, it is there; not before"

    def test_nothing_is_there_twice(self) -> None:
        frames = Frames()
        assert list(frames.feed(frame(b"one"))) == [b"one"], "it is whole"
        assert list(frames.feed(b"")) == [], "what was handed out has left the buffer"
        assert list(frames.feed(frame(b"two"))) == [b"two"], "and the next one begins after it"

    def test_a_message_of_more_than_255_bytes(self) -> None:
        text = b"x" * 70_000
        assert list(Frames().feed(frame(text))) == [text], "the length has four bytes, the lowest first"

    def test_messages_are_bytes_of_their_own(self) -> None:
        frames = Frames()
        (first,) = frames.feed(frame(b"one"))
        list(frames.feed(frame(b"two")))
        assert first == b"one", "what was handed out does not change when more comes"
        assert isinstance(first, bytes), "a decoder keeps views of what it reads: hand out bytes, not the buffer"

    def test_a_message_that_nobody_could_read_does_not_come_again(self) -> None:
        """Its reader raises, so nothing takes the messages behind it either, until the next piece comes."""
        frames = Frames()
        assert next(iter(frames.feed(frame(b"bad") + frame(b"good")))) == b"bad", "the first message"
        again = list(frames.feed(frame(b"new")))
        assert b"bad" not in again, "it was handed out: it comes again with each piece, and its reader fails each time"
        assert again == [b"good", b"new"], f"what stands behind it comes with the next piece: good and new, not {again}"

    def test_a_length_has_all_of_its_four_bytes(self) -> None:
        for start in (b"\0\0\0\x01", b"\0\0\0\x80"):  # a message of 16 MB, of 2 GB
            frames = Frames()
            assert list(frames.feed(start + b"abc")) == [], "the highest byte of the length counts, and it has no sign"

    @pytest.mark.parametrize("size", [7, 1_000_000], ids=["in pieces that it tears", "in one piece"])
    def test_the_buffer_is_not_copied_for_each_message(self, size: int) -> None:
        """Counts the bytes that are read from the buffer: 2,000 short messages, and a long one that comes torn."""
        frames, stream = Frames(), frame(b"x" * 10) * 2_000 + frame(b"y" * 10_000)
        got = Counted.count = 0
        for start in range(0, len(stream), size):
            frames._buffer = Counted(frames._buffer)
            got += len(list(frames.feed(stream[start : start + size])))
        assert got == 2_001, "all messages are there"
        assert Counted.count <= 4 * len(stream), (
            f"{Counted.count:,} bytes were copied out of {len(stream):,}: a message is copied once or twice, what waits behind it never"
        )

    @given(st.lists(st.binary(max_size=9), max_size=6), st.data())
    def test_however_it_is_torn(self, messages: list[bytes], data: st.DataObject) -> None:
        stream = b"".join(map(frame, messages))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
        frames, got = Frames(), []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            got += frames.feed(stream[start:end])
        assert got == messages, f"cut at {cuts}, the same messages come out"
