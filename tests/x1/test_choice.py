"""A mask for `choice`: which tokens may come next if the answer must be one of a few texts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.structured_output.choice import choice_mask
from tests.tiny import worked_case

TOKENS = [b"y", b"ye", b"yes", b"es", b"s", b"n", b"no", b"o", b" ", b"yes", b"yesno"]
VOCABULARY = {token: [i for i, other in enumerate(TOKENS) if other == token] for token in TOKENS}
END = 99


def test_a_worked_case() -> None:
    """ "yes", "no" and "yesno", at five moments."""
    choices = [b"yes", b"no", b"yesno"]
    got = {f"so far {so_far.decode()!r}": spelled(choices, so_far) for so_far in (b"", b"y", b"yes", b"yesn", b"no")}
    says = "each token with which a choice goes on, by its bytes: two tokens are yes; a choice that is complete may end"
    expected = [
        ["y", "ye", "yes", "n", "no", "yes", "yesno"],
        ["es"],
        ["n", "no", "end"],
        ["o"],
        ["end"],
    ]
    worked_case("x1.6", got, dict(zip(got, expected, strict=True)), says)


def spelled(choices: list[bytes], so_far: bytes) -> list[str]:
    """The mask, as texts of tokens."""
    return ["end" if i == END else TOKENS[i].decode() for i in choice_mask(VOCABULARY, choices, so_far, [END])]


def test_one_choice_begins_another() -> None:
    assert choice_mask(VOCABULARY, [b"yes", b"yesno"], b"yes", [END]) == [5, 6, END], "it may end, or go on"
    assert choice_mask(VOCABULARY, [b"yes", b"yesno"], b"", [END]) == [0, 1, 2, 9, 10], "each token once, in order"


def test_any_collection_of_choices() -> None:
    """They have no order that counts, and need no index."""
    for choices in ({b"yes", b"no"}, frozenset([b"yes", b"no"]), dict.fromkeys([b"no", b"yes"]), (b"yes", b"no")):
        said = f"the choices may come as a {type(choices).__name__}"
        assert choice_mask(VOCABULARY, choices, b"", [END]) == [0, 1, 2, 5, 6, 9], said
        assert choice_mask(VOCABULARY, choices, b"no", [END]) == [END], said


def test_several_ends_and_a_half_character() -> None:
    vocabulary = {b"\xc3": [7], b"\xa9": [8]}
    choices = ["é".encode()]
    assert choice_mask(vocabulary, choices, b"", [1, 0]) == [7], "the first byte of é is a token"
    assert choice_mask(vocabulary, choices, b"\xc3", [1, 0]) == [8], "half a character goes on with its other half"
    assert choice_mask(vocabulary, choices, b"\xc3\xa9", [1, 0]) == [0, 1], "any of the ends, in ascending order"


def test_an_end_among_the_others() -> None:
    assert choice_mask(VOCABULARY, [b"yes", b"yesno"], b"yes", [6, 2]) == [2, 5, 6], (
        "all ids ascending, those that end an answer too; n and an end have the same id here, which comes once"
    )


def test_a_long_token_of_a_long_choice() -> None:
    choice = b"a choice of very many letters" * 40
    assert choice_mask({choice: [3], choice[:900]: [2]}, [choice], b"", [END]) == [2, 3], "tokens may be of any length"


def test_a_token_without_bytes_never_comes() -> None:
    """The answer would not go on, and nothing would end it."""
    vocabulary = {b"": [4], b"y": [0], b"yes": [1]}
    for so_far, wanted in {b"": [0, 1], b"yes": [END]}.items():
        got = choice_mask(vocabulary, [b"yes"], so_far, [END])
        assert got == wanted, f"behind {so_far!r} come {wanted}, not {got}: token 4 has no bytes"


class LookedUp(dict[bytes, list[int]]):
    """A vocabulary that counts its look-ups, and cannot be walked through."""

    count = 0

    def __getitem__(self, token: bytes) -> list[int]:
        self.count += 1
        return super().__getitem__(token)

    def get(self, token: bytes, default: Any = None) -> Any:
        self.count += 1
        return super().get(token, default)

    def __contains__(self, token: object) -> bool:
        self.count += 1
        return super().__contains__(token)

    def _walk(self, *_: object) -> Any:
        raise AssertionError(
            "the vocabulary has 150,000 tokens: look up what the choices can go on with instead of trying each"
        )

    __iter__ = __reversed__ = keys = items = values = copy = _walk


def test_the_vocabulary_is_looked_up_in_and_not_walked_through() -> None:
    """ "yes" and "yesno" behind "y": "e", "es", then "e", "es", "esn", "esno" may come, which is six."""
    vocabulary = LookedUp(VOCABULARY)
    assert choice_mask(vocabulary, [b"yes", b"yesno", b"no"], b"y", [END]) == [3], "only es goes on from y"
    assert vocabulary.count <= 12, f"{vocabulary.count} look-ups for six texts that may come (two each are forgiven)"


texts = st.text("ab", min_size=1, max_size=5).map(str.encode)


@given(st.lists(texts, min_size=1, max_size=4, unique=True), st.lists(texts, min_size=1, max_size=8), st.data())
def test_against_every_token(choices: list[bytes], tokens: list[bytes], data: st.DataObject) -> None:
    """The same as to try every token of the vocabulary."""
    vocabulary: dict[bytes, list[int]] = {}
    for i, token in enumerate(tokens):
        vocabulary.setdefault(token, []).append(i)
    choice = data.draw(st.sampled_from(choices))
    so_far = choice[: data.draw(st.integers(0, len(choice)))]
    fits = [i for i, token in enumerate(tokens) if any(c.startswith(so_far + token) for c in choices)]
    assert choice_mask(vocabulary, choices, so_far, [END]) == fits + [END] * (so_far in choices), (
        "the same tokens as if each of the vocabulary had been tried"
    )
