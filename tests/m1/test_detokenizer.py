"""m1.7: text comes out a token at a time, all of it, and never half a character."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from folovllm.engine.detokenizer import IncrementalDetokenizer
from folovllm.engine.detokenizer_stream import StreamDetokenizer
from tests.helpers import tiny_tokenizer
from tests.tiny import worked_case

Make = Callable[[], IncrementalDetokenizer]
TOKENIZER = tiny_tokenizer()  # one token a byte, so that every character but ASCII comes in pieces
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
texts = st.text(st.characters(exclude_characters=REPLACEMENT, exclude_categories=["Cs"]), max_size=12)


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def new() -> IncrementalDetokenizer:
    return IncrementalDetokenizer(decode)


def new_stream() -> IncrementalDetokenizer:
    """M6's."""
    return StreamDetokenizer(decode, TOKENIZER.backend_tokenizer, True)


def append(detokenizer: IncrementalDetokenizer, text: str) -> None:
    for token in TOKENIZER.encode(text):
        detokenizer.append(token)


class Words:
    """A decoder of the other kind: a space joins words, so a token's text depends on its neighbour."""

    def __init__(self) -> None:
        self.longest = 0

    def __call__(self, ids: list[int]) -> str:
        self.longest = max(self.longest, len(ids))
        return " ".join(f"w{i}" for i in ids)


def deltas_of(detokenizer: IncrementalDetokenizer, tokens: list[int]) -> list[str]:
    """What `advance` returns after each token."""
    deltas = []
    for token in tokens:
        detokenizer.append(token)
        deltas.append(detokenizer.advance())
    return deltas


class TestAdvance:
    def test_a_worked_case(self) -> None:
        words = Words()
        got = {
            "é, whose two bytes are a token each": deltas_of(new(), TOKENIZER.encode("aéb")),
            "tokens 0 to 5 of a decoder that joins words": deltas_of(IncrementalDetokenizer(words), list(range(6))),
            "were more than four tokens ever decoded at once?": words.longest > 4,
        }
        answers = [["a", "", "é", "b"], ["w0", " w1", " w2", " w3", " w4", " w5"], False]
        says = "what each token adds to the text: half a character nothing, and a word the space before it"
        worked_case("m1.7", got, dict(zip(got, answers, strict=True)), says)

    def test_a_character_of_four_bytes_comes_at_once(self) -> None:
        says = "the first three of a character's four bytes show nothing, the fourth shows it whole"
        assert deltas_of(new(), TOKENIZER.encode("a😀b")) == ["a", "", "", "", "😀", "b"], says

    def test_several_tokens_at_once_and_none(self) -> None:
        detokenizer = IncrementalDetokenizer(Words())
        assert detokenizer.advance() == "", "nothing was appended: nothing is new"
        for token in range(3):
            detokenizer.append(token)
        assert detokenizer.advance() == "w0 w1 w2", "three tokens at once give the text of all three"
        assert detokenizer.advance() == "", "asked again with nothing appended: nothing is new"
        detokenizer.append(3)
        assert detokenizer.advance() == " w3", "the window did not move: the space before the word is still seen"
        assert detokenizer.text == "w0 w1 w2 w3", "`text` is all that was shown"

    def test_the_window_stays_short(self) -> None:
        words = Words()
        deltas_of(IncrementalDetokenizer(words), list(range(200)))
        assert words.longest <= 4, "decoding everything anew makes the whole answer quadratic"

    def test_bytes_that_are_no_character_do_not_hold_up_what_follows(self) -> None:
        detokenizer = new()
        stray = TOKENIZER.encode("é")[-1]  # a byte that no character begins with
        deltas_of(detokenizer, [stray, *TOKENIZER.encode("ab")])
        assert detokenizer.text == REPLACEMENT + "ab", "a byte that is no character is shown with what follows it"

    def test_tokens_without_text(self) -> None:
        a, b, c = TOKENIZER.encode("abc")
        says = "a special token has no text, and what follows is neither lost nor late"
        assert deltas_of(new(), [a, 257, b, 258, 258, c]) == ["a", "", "b", "", "", "c"], says

    @given(texts)
    def test_deltas_add_up_and_hold_whole_characters(self, text: str) -> None:
        detokenizer, deltas = new(), []
        for token in TOKENIZER.encode(text):
            detokenizer.append(token)
            deltas.append(detokenizer.advance())
            assert REPLACEMENT not in deltas[-1], "half a character was shown"
            assert detokenizer.text == "".join(deltas), "`text` is all that was shown so far"
        assert "".join(deltas) == text, "the pieces add up to the text"


@pytest.mark.parametrize("make", [new, pytest.param(new_stream, marks=pytest.mark.m6)])
class TestWholeDetokenizer:
    @given(st.lists(st.integers(0, 258), max_size=30))
    def test_any_tokens_with_flush_give_what_decoding_at_once_gives(self, make: Make, ids: list[int]) -> None:
        detokenizer = make()
        shown = "".join(deltas_of(detokenizer, ids)) + detokenizer.flush()
        assert shown == detokenizer.text == decode(ids)
        assert detokenizer.flush() == "", "an incomplete character is shown once"

    @given(text=st.text("abc", max_size=20), stop=st.text("abc", min_size=1, max_size=3), include=st.booleans())
    def test_a_stop_string_cuts_the_text(self, make: Make, text: str, stop: str, include: bool) -> None:
        detokenizer, found = make(), None
        for token in TOKENIZER.encode(text):
            detokenizer.append(token)
            if found := detokenizer.find_stop(["zz", stop], include):
                break
        assert found == (stop if stop in text else None)
        before, match, _ = text.partition(stop)
        assert detokenizer.flush() == "" and detokenizer.text == before + (match if include else "")

    def test_the_first_stop_string_in_the_text_wins(self, make: Make) -> None:
        detokenizer = make()
        append(detokenizer, "abcd")
        assert detokenizer.find_stop(["d", "bc"]) == "bc"
        assert detokenizer.text == "a"

    def test_a_skipped_stop_string_is_never_found(self, make: Make) -> None:
        detokenizer = make()
        append(detokenizer, "abc")
        detokenizer.skip_search()
        append(detokenizer, "dexbcde")
        assert detokenizer.find_stop(["bcde"]) == "bcde"
        assert detokenizer.text == "abcdex", "the first bcde began where the search was not allowed"

    def test_the_last_token_is_taken_back(self, make: Make) -> None:
        detokenizer = make()
        append(detokenizer, "ab")
        detokenizer.forget_last()
        detokenizer.flush()
        assert detokenizer.text == "a"
