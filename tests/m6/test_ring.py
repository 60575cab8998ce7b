"""The ring: what a writer and its readers do, and in which order."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from folovllm.executor.ring import SLOTS, Ring
from folovllm.step.schedule import Int32
from tests.tiny import worked_case

FENCE = "_order()"


def message(*numbers: int) -> Int32:
    return np.array(numbers, np.int32)


class Watched(np.ndarray[Any, Any]):
    """An array of the ring's memory that notes by name when it, or a part of it, is written to; of two equal notes one."""

    def __array_finalize__(self, array: Any) -> None:
        self.name, self.log = getattr(array, "name", ""), getattr(array, "log", [])

    def note(self, what: str) -> None:
        if self.log[-1:] != [what]:
            self.log.append(what)

    def __getitem__(self, key: Any) -> Any:
        if self.name in ("slot", "length"):
            self.note(f"look into the {self.name}")
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.note(f"set {self.name}")
        self.view(np.ndarray)[key] = value  # numpy's own would look into it first, and be noted

    def __iadd__(self, value: Any) -> Any:
        self.note(f"set {self.name}")
        return super().__iadd__(value)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.copyto and isinstance(args[0], Watched):
            args[0].note(f"set {args[0].name}")
        return super().__array_function__(function, types, args, kwargs)


def watched(ring: Ring) -> list[str]:
    """From now on a list of what is done to the ring, in order."""
    log: list[str] = []
    for field, name in (("_written", "written"), ("_taken", "taken"), ("_lengths", "length"), ("_slots", "slot")):
        array = getattr(ring, field).view(Watched)
        array.name, array.log = name, log
        setattr(ring, field, array)
    order = ring._order
    ring._order = lambda: log.append(FENCE) or order()
    return log


class TestRing:
    def test_a_worked_case(self) -> None:
        ring = Ring(num_readers=1, capacity=4)
        numbers = [ring.write(message(*range(n))) for n in (3, 2, 0, 1)]
        first = ring.read(0)
        assert first is not None, "four messages were written, and none was read"
        assert first.dtype == np.int32, "int32, as it was written"
        read = [first, ring.read(0)]
        numbers.append(ring.write(message(7, 8, 9)))
        got = {
            "the messages' numbers": numbers,
            "the first two, after a fifth took the first one's slot": read,
            "written, then taken": [int(ring._written[0]), int(ring._taken[0])],
            "slot 0 and its length": [ring._slots[0, :3], int(ring._lengths[0])],
        }
        expected = [[0, 1, 2, 3, 4], [[0, 1, 2], [0, 1]], [5, 2], [[7, 8, 9], 3]]
        says = "four slots: message 4 lies where message 0 was, and who read message 0 has a copy of it"
        worked_case("m6.10", got, dict(zip(got, expected, strict=True)), says)
        ring.close()

    def test_a_message_is_there_before_it_is_announced(self) -> None:
        ring = Ring(1, 4)
        log = watched(ring)
        ring.write(message(1, 2))
        assert FENCE in log, f"nothing keeps the count behind the message, no {FENCE}: {log}"
        before = set(log[: log.index(FENCE)]) - {"look into the slot"}  # which `slots[i][:n] = ...` does
        assert before == {"set slot", "set length"}, f"first the message and its length, then {FENCE}: {log}"
        assert log[-1] == "set written", f"the count comes last, behind {FENCE}: {log}"
        ring.close()

    def test_a_slot_is_given_back_after_it_was_copied(self) -> None:
        ring = Ring(1, 4)
        ring.write(message(1, 2))
        log = watched(ring)
        ring.read(0)
        said = f"{FENCE}, the length and the copy, {FENCE}, and only then is the slot free: {log}"
        assert (log[0], log[-2:]) == (FENCE, [FENCE, "set taken"]), said
        assert set(log[1:-2]) == {"look into the length", "look into the slot"}, said
        ring.close()

    def test_nothing_there_is_none_and_touches_nothing(self) -> None:
        ring = Ring(2, 4)
        assert ring.read(1) is None, "nothing was written"
        ring.write(message(5))
        assert ring.read(0, 1) is None, "message 1 is not there yet, although message 0 is"
        for number in (2, 3, 4, 9):
            assert ring.read(0, number) is None, f"one message was written: number {number} is not there yet"
        assert ring._taken.tolist() == [0, 0], "a reader that got nothing has taken nothing"
        ring.close()

    def test_readers_go_at_their_own_pace(self) -> None:
        ring = Ring(2, 4)
        ring.write(message(1))
        ring.write(message(2))
        later = ring.read(0, 1)
        assert later is not None and later.tolist() == [2], "a reader may ask for message 1 without message 0"
        assert ring._taken.tolist() == [2, 0], "reader 0 is past message 1 and so past 0; reader 1 has taken nothing"
        ring.close()

    @given(st.lists(st.integers(0, 2), max_size=60))
    def test_every_reader_gets_every_message_in_order(self, turns: list[int]) -> None:
        """0 writes if there is room; 1 and 2 are readers, of another process's ring over the same file. It waits for the slowest."""
        ring = Ring(2, 8)
        other, written, seen = Ring(2, 8, ring.fd), 0, [0, 0]
        for turn in turns:
            if turn == 0 and ring.has_room():
                assert ring.write(message(*[written] * (written % 9))) == written, "a message's number counts from 0"
                written += 1
            elif turn:
                got = other.read(turn - 1)
                if seen[turn - 1] == written:
                    assert got is None, "this reader has had all there is"
                else:
                    n = seen[turn - 1]
                    assert got is not None and got.tolist() == [n] * (n % 9), f"reader {turn - 1} is at message {n}"
                    seen[turn - 1] += 1
            room = written - min(seen) < SLOTS
            assert ring.has_room() == room, "there is room until a slot's message would be lost to the slowest reader"
        ring.close()
