"""x3.2: which of the sampled tokens plain decoding would have sampled as well."""

from hypothesis import given
from hypothesis import strategies as st

from folovllm.electives.spec_decode.verify import accept
from tests.tiny import worked_case

Tokens = st.lists(st.integers(0, 2), max_size=6)


def test_a_worked_case() -> None:
    got = accept([5, 6, 1, 8, 9, 4], [5, 6, 7, 8, 9])
    says = "5 and 6 were drafted; 1 was sampled after them, and nobody drafted it; all others were sampled after 7, which is wrong"
    worked_case("x3.2", got, [5, 6, 1], says)


def test_all_are_right() -> None:
    assert accept([5, 6, 7, 8], [5, 6, 7]) == [5, 6, 7, 8], "three draft tokens and a bonus"


def test_none_is_right() -> None:
    assert accept([4, 6, 7], [5, 6]) == [4], "the first sample follows a certain token: a step always yields one"


def test_without_drafts() -> None:
    assert accept([4], []) == [4], "plain decoding"


def test_what_was_given_stays() -> None:
    """Wherever the draft is wrong. The answer is a list of its own, which others may change."""
    for sampled in [5, 6, 1, 8], [5, 6, 7, 8], [4, 6, 7, 8]:
        given, draft = list(sampled), [5, 6, 7]
        accept(given, draft).append(9)
        assert (given, draft) == (sampled, [5, 6, 7]), f"of {sampled} and {[5, 6, 7]} became {given} and {draft}"


@given(Tokens, st.integers(0, 6), st.integers(0, 6))
def test_it_is_the_text_of_plain_decoding(drafts: list[int], at: int, seed: int) -> None:
    """A model whose next token is a function of the tokens so far, asked after each draft."""

    def model(before: list[int]) -> int:
        return (3 * sum(before) + 2 * len(before) + seed) % 3

    drafts = [model(drafts[:i]) if i < at else draft for i, draft in enumerate(drafts)]
    sampled = [model(drafts[:i]) for i in range(len(drafts) + 1)]
    plain: list[int] = []
    for draft in [*drafts, None]:
        plain.append(model(plain))
        if plain[-1] != draft:
            break
    assert accept(sampled, drafts) == plain, f"sampled {sampled}, drafted {drafts}: plain decoding has {plain}"
