"""x3.2: which of the drawn tokens plain decoding would have drawn as well."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from folovllm.spec_decode.verify import accept
from tests.tiny import worked_case

Tokens = st.lists(st.integers(0, 2), max_size=6)


def test_a_worked_case() -> None:
    got = accept([5, 6, 1, 8, 9, 4], [5, 6, 7, 8, 9])
    says = "5 and 6 were guessed; 1 was drawn after them, and nobody guessed it; all others were drawn after 7, which is wrong"
    worked_case("x3.2", got, [5, 6, 1], says)


def test_all_are_right() -> None:
    assert accept([5, 6, 7, 8], [5, 6, 7]) == [5, 6, 7, 8], "three guesses and a bonus"


def test_none_is_right() -> None:
    assert accept([4, 6, 7], [5, 6]) == [4], "the first draw follows a certain token: a step always yields one"


def test_without_guesses() -> None:
    assert accept([4], []) == [4], "plain decoding"


@given(Tokens, st.integers(0, 6), st.integers(0, 6))
def test_it_is_the_text_of_plain_decoding(guesses: list[int], at: int, seed: int) -> None:
    """A model whose next token is a function of the tokens so far, asked after each guess."""

    def model(before: list[int]) -> int:
        return (3 * sum(before) + 2 * len(before) + seed) % 3

    guesses = [model(guesses[:i]) if i < at else guess for i, guess in enumerate(guesses)]
    drawn = [model(guesses[:i]) for i in range(len(guesses) + 1)]
    plain: list[int] = []
    for guess in [*guesses, None]:
        plain.append(model(plain))
        if plain[-1] != guess:
            break
    assert accept(drawn, guesses) == plain, f"drawn {drawn} with the guesses {guesses}"
