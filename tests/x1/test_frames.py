"""Messages out of a stream of bytes, which arrives in pieces that nobody chose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from folovllm.server.messages import Frames, frame
from tests.tiny import worked_case


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

    @given(st.lists(st.binary(max_size=9), max_size=6), st.data())
    def test_however_it_is_torn(self, messages: list[bytes], data: st.DataObject) -> None:
        stream = b"".join(map(frame, messages))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
        frames, got = Frames(), []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            got += frames.feed(stream[start:end])
        assert got == messages, f"cut at {cuts}, the same messages come out"
