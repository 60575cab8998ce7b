"""Prompt lookup against a search through the whole text."""

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.spec_decode.ngram import Lookup, NgramProposer
from folovllm.electives.spec_decode.proposer import RowState
from folovllm.step.schedule import SamplingSpec
from tests.tiny import worked_case

Texts = st.lists(st.integers(0, 3), max_size=40)


def searched(text: list[int], shortest: int, longest: int, k: int) -> list[int]:
    """The same by brute force: the longest run first, its latest place first, one token after the other."""
    end = len(text)
    for n in range(longest, shortest - 1, -1):
        for start in range(end - n - 1, -1, -1):
            if n <= end and text[start : start + n] == text[end - n :]:
                grown = list(text)
                for i in range(k):
                    grown.append(grown[start + n + i])
                return grown[end:]
    return []


def looked_up(text: list[int], k: int, shortest: int = 1, longest: int = 3) -> list[int]:
    lookup = Lookup(shortest, longest)
    lookup.extend(text)
    return lookup.propose(k)


class Counted(dict[tuple[int, ...], int]):
    """Notes that count how often they are written."""

    writes = 0

    def __setitem__(self, key: tuple[int, ...], value: int) -> None:
        self.writes += 1
        super().__setitem__(key, value)


class Text(list[int]):
    """A text that counts the tokens that are read in it."""

    reads: ClassVar[int] = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        Text.reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        Text.reads += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        Text.reads += len(self)
        return super().__add__(other)


class TestLookup:
    def test_a_worked_case(self) -> None:
        lookup = Lookup(1, 2)
        lookup.extend([4, 5, 4])
        noted = sorted(f"{' '.join(map(str, run))}: {place}" for run, place in lookup._after.items())
        says = "5, at place 1, followed 4; 4, at place 2, followed 5 and 4 5; nothing has followed the last 4 yet"
        worked_case("x3.1 runs", noted, ["4 5: 2", "4: 1", "5: 2"], says)
        got = {
            "4 1 2 7 1 2 8 4 1 2": looked_up([4, 1, 2, 7, 1, 2, 8, 4, 1, 2], k=4, shortest=2),
            "4 5 4 6 4": looked_up([4, 5, 4, 6, 4], k=2),
            "1 2 1 2": looked_up([1, 2, 1, 2], k=5, shortest=2),
        }
        says = "4 1 2 was followed by 7 1 2 8; the last 4 by 6 4; 1 2 by 1 2, and so on with what was copied"
        worked_case("x3.1", got, dict(zip(got, [[7, 1, 2, 8], [6, 4], [1, 2, 1, 2, 1]], strict=True)), says)

    def test_what_followed_comes_again(self) -> None:
        assert looked_up([7, 8, 9, 1, 2, 7, 8], k=3) == [9, 1, 2], '"7 8" was followed by 9, 1, 2'

    def test_nothing_is_made_up(self) -> None:
        assert looked_up([1, 2, 3, 4], k=3) == [], "no token of the end occurred before: there is no draft"
        assert looked_up([], k=3) == [], "an empty text gives no draft"

    def test_the_longest_run_decides(self) -> None:
        found = looked_up([1, 2, 3, 5, 2, 3, 6, 1, 2, 3], k=1)
        assert found != [6], "6 is what followed the shorter run 2 3 the last time; the run 1 2 3 was there, too"
        assert found == [5], "what followed 1 2 3"

    def test_the_latest_place_decides(self) -> None:
        found = looked_up([4, 5, 4, 6, 4], k=1)
        assert found != [5], "5 followed the first 4: the last one is nearer to what is being written"
        assert found == [6], "what followed the last 4 that something follows"

    def test_a_draft_token_goes_on_with_itself(self) -> None:
        assert looked_up([1, 2, 1, 2], k=5) == [1, 2, 1, 2, 1], "behind the end of the text, copy what was copied"

    def test_runs_have_bounds(self) -> None:
        assert looked_up([1, 9, 1], k=1, shortest=2) == [], "one token is shorter than the shortest run"
        assert looked_up([1, 2, 3, 5, 2, 3, 6, 1, 2, 3], k=1, longest=2) == [6], "runs of three are not looked at"

    def test_a_run_is_no_longer_than_the_text(self) -> None:
        """Nine tokens, runs of up to ten: what stands ten before the end is not there."""
        found = looked_up([1, 2, 3, 4, 2, 3, 1, 2, 3], k=2, longest=10)
        assert found == [4, 2], f"the longest run with which the text ends is 1 2 3, followed by 4 2, not by {found}"

    def test_a_draft_is_no_part_of_the_text(self) -> None:
        lookup = Lookup(1, 3)
        lookup.extend([1, 2, 1])
        assert lookup.propose(4) == [2, 1, 2, 1], "behind the text's end copy what was copied, not its beginning"
        assert lookup.tokens == [1, 2, 1], f"a draft is not accepted yet, but the text is now {lookup.tokens}"

    def test_a_token_costs_the_same_however_long_the_text_is(self) -> None:
        """Runs of 2 to 4 tokens: 9 to read for a token and 9 for a draft, beside the two that are copied."""
        lookup = Lookup(2, 4)
        lookup._after = counted = Counted()
        for length in range(1, 400):
            lookup.tokens = Text(lookup.tokens)
            writes, Text.reads = counted.writes, 0
            lookup.extend([length % 7])
            assert counted.writes - writes <= 3, f"token {length} noted more than one run of each length"
            assert Text.reads <= 30, f"token {length}: {Text.reads} tokens were read to note three short runs"
            Text.reads = 0
            lookup.propose(2)
            assert Text.reads <= 30, f"a draft in a text of {length} read {Text.reads} tokens of it to copy two"
        lookup.extend([8, 9, *[5] * 400, 8, 9])
        lookup.tokens, Text.reads = Text(lookup.tokens), 0
        assert lookup.propose(2) == [5, 5], '"8 9" was followed by 5, 5, four hundred tokens ago'
        assert Text.reads <= 30, f"what was found is far back: {Text.reads} tokens of the text were read to copy two"

    @given(Texts, st.integers(1, 3), st.integers(0, 2), st.integers(1, 6), st.integers(0, 40))
    def test_equals_a_search(self, text: list[int], shortest: int, more: int, k: int, cut: int) -> None:
        lookup = Lookup(shortest, shortest + more)
        lookup.extend(text[:cut])
        lookup.propose(k)
        lookup.extend(text[cut:])
        expected = searched(text, shortest, shortest + more, k)
        assert lookup.propose(k) == expected, f"{text}, runs of {shortest} to {shortest + more}: {expected}"


class TestProposer:
    def state(self, seq_id: int, *tokens: int) -> RowState:
        return RowState(seq_id, np.array(tokens, np.int32), 1, SamplingSpec())

    def test_each_sequence_has_its_own_text(self) -> None:
        proposer = NgramProposer(1, 2)
        assert proposer.propose(self.state(1, 5, 6, 5), 1) == [6]
        assert proposer.propose(self.state(2, 5, 7, 5), 2) == [7, 5]
        assert proposer.propose(self.state(1, 5, 6, 5, 8, 6), 1) == [5], "two tokens came since it was asked"
        proposer.finish(1)
        proposer.finish(3)
        assert not proposer._texts.keys() - {2}, "a sequence that ended leaves nothing behind"
