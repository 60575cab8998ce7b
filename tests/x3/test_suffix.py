"""The suffix automaton against plain searches, and what is drafted with it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from folovllm.electives.spec_decode import automaton, suffix
from folovllm.electives.spec_decode.automaton import NOWHERE, Place, SuffixAutomaton
from folovllm.electives.spec_decode.proposer import RowState
from folovllm.electives.spec_decode.suffix import ANSWER_ENDS, LEARNT_AT_ONCE, SuffixProposer, most_frequent
from folovllm.llm import LLM
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SamplingSpec
from tests.helpers import tiny_checkpoint
from tests.tiny import worked_case
from tests.x3.engines import speculation_of

Texts = st.lists(st.integers(0, 2), max_size=30)


def automaton_of(*texts: list[int]) -> SuffixAutomaton:
    grown = SuffixAutomaton()
    for text in texts:
        for token in text:
            grown.append(token)
    return grown


def places(text: list[int], run: list[int]) -> list[int]:
    """Where `run` ends in `text`."""
    n = len(run)
    return [i for i in range(n, len(text) + 1) if text[i - n : i] == run]


def followed(other: SuffixAutomaton, text: list[int]) -> Place:
    place = NOWHERE
    for token in text:
        place = other.follow(place, token)
    return place


class TestAutomaton:
    @settings(max_examples=40)
    @given(Texts, Texts)
    def test_repeats_and_counts_equal_a_search(self, first: list[int], second: list[int]) -> None:
        text, grown = first + second, automaton_of(first, second)
        repeat = grown.longest_repeat()
        lengths = [n for n in range(1, len(text)) if len(places(text, text[-n:])) > 1]
        assert repeat.length == max(lengths, default=0)
        for n in range(1, repeat.length + 1):
            after = [text[i] for i in places(text, text[-n:]) if i < len(text)]
            found = grown.following(followed(grown, text[-n:]))
            assert found == {token: after.count(token) for token in after}, f"after the last {n} tokens of {text}"

    def test_what_it_counts_is_bounded(self) -> None:
        text = automaton_of([1] * (automaton.MOST + 50))
        assert text.following(text.follow(NOWHERE, 1)) == {1: automaton.MOST}

    @given(Texts)
    def test_it_has_two_states_a_token_at_most(self, text: list[int]) -> None:
        assert len(automaton_of(text)._next) <= 2 * len(text) + 1

    def test_the_work_for_a_token_does_not_grow_with_the_text(self) -> None:
        def visits(length: int) -> int:
            grown = SuffixAutomaton()
            grown._link = seen = Counted([-1])
            for i in range(length):
                grown.append(0 if i % 500 else 1)  # long runs of one token: the longest chains of links
            return seen.reads

        assert visits(2000) < 2 * visits(1000) + 4 * 1000, "twice the text is more than twice the work"


class Counted(list[int]):
    """A list that counts how often it is asked."""

    reads = 0

    def __getitem__(self, at: Any) -> Any:
        self.reads += 1
        return super().__getitem__(at)


class TestFollow:
    """x3.5: where a text stands in another one."""

    def test_a_worked_case(self) -> None:
        other, place, got = automaton_of([1, 2, 3, 7, 2, 4]), NOWHERE, {}
        for token in (9, 1, 2, 4, 5, 7):
            place = other.follow(place, token)
            got[f"after {token}"] = place.length
        says = "1 2 3 7 2 4 holds no 9; 1; 1 2; of 1 2 4 only 2 4; no 5; 7"
        worked_case("x3.5", got, dict(zip(got, [0, 1, 2, 2, 0, 1], strict=True)), says)

    def test_a_run_goes_on(self) -> None:
        other = automaton_of([1, 2, 3, 4])
        assert followed(other, [9, 2, 3]).length == 2, "the other text holds 2 3, and no 9"

    def test_the_front_is_given_up_before_the_match(self) -> None:
        other = automaton_of([1, 2, 3, 7, 2, 4])
        assert followed(other, [1, 2, 4]).length == 2, '"1 2 4" is not there, "2 4" is: keep as much as possible'

    def test_nothing_in_common(self) -> None:
        other = automaton_of([1, 2])
        assert followed(other, [1, 9]) == NOWHERE, "no token of the end is in the other text"
        assert followed(other, [1, 9, 2]).length == 1, "behind a token that is not there, begin anew"

    def test_the_other_text_grows(self) -> None:
        """In 1 2 3 the runs 3 and 2 3 share a state. Behind 4 2 3 they have parted from 1 2 3, and 5 follows only them."""
        other = automaton_of([1, 2, 3])
        place = followed(other, [3])
        for token in (4, 2, 3, 5):
            other.append(token)
        found = other.follow(place, 5).length
        assert found != 3, "the place was a run of one token, 3: with 5 it has two; its state has been split since"
        assert found == 2, "3 5 is there"

    def test_a_token_costs_the_same_however_long_the_run_is(self) -> None:
        """The other text is 300 ones and a 2: behind 300 ones each further 1 drops a token, and 9 drops all at once."""
        other = automaton_of([1] * 300 + [2])
        other._link = counted = Counted(other._link)
        place = NOWHERE
        for n, token in enumerate([1] * 600 + [9] * 100 + [2] * 100, 1):
            place = other.follow(place, token)
            assert counted.reads <= 6 * n + 6 * 300, f"{counted.reads} links were read for {n} tokens of runs up to 300"
        assert place.length == 1, "2 2 is not in the other text, 2 is"

    @given(Texts, Texts, Texts)
    def test_equals_a_search_as_the_other_text_grows(self, other: list[int], text: list[int], more: list[int]) -> None:
        grown = automaton_of(other)
        place = followed(grown, text)
        longest = max((n for n in range(1, len(text) + 1) if places(other, text[-n:])), default=0)
        assert place.length == longest, f"of {text} the last {longest} are in {other}, not {place.length}"
        for token in more:
            grown.append(token)
        run, whole = text[len(text) - longest :], other + more
        after = [whole[i] for i in places(whole, run) if i < len(whole)] if run else None
        if after is not None:
            assert grown.following(place) == {token: after.count(token) for token in after}, "a state was split"


class TestMostFrequent:
    @pytest.mark.parametrize(("text", "k", "least", "expected"), [
        ([1, 2, 5, 1, 2, 6, 1, 2, 5, 9, 1, 2], 1, 0.2, [5]),  # 5 followed twice, 6 once
        ([1, 2, 5, 1, 2, 6, 1, 2], 1, 0.2, [6]),  # of equals the newest
        ([*range(40), 0, 1], 40, 0.2, [*range(2, 10)]),  # L * (1 / least - 1) tokens for a match of L = 2
        ([*range(40), 0, 1, 2, 3, 4], 40, 0.2, [*range(5, 25)]),
        ([1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3, 8, 9, 1, 2], 3, 0.4, [3]),  # after 1 2 3 came 4, 6 and 8
    ])  # fmt: skip
    def test_a_draft_goes_on_as_the_text_did(self, text: list[int], k: int, least: float, expected: list[int]) -> None:
        grown = automaton_of(text)
        assert most_frequent(grown, grown.longest_repeat(), k, least).token_ids == expected

    def test_nothing_behind_the_end_of_an_answer(self) -> None:
        grown = automaton_of([1, 2, 3, ANSWER_ENDS, 4, 5])
        assert most_frequent(grown, followed(grown, [1, 2]), 5, 0.0).token_ids == [3]

    def test_the_score_is_what_is_expected(self) -> None:
        grown = automaton_of([1, 2, 3, 4, 1, 2])
        assert most_frequent(grown, grown.longest_repeat(), 2, 0.0).score == 2 / 3 + 2 / 4


class TestPastAnswers:
    @settings(max_examples=40)
    @given(
        st.lists(st.tuples(st.sampled_from([None, "a", "b"]), st.lists(st.integers(0, 5), max_size=12)), max_size=12)
    )
    def test_memory_is_bounded_and_the_latest_are_kept_apart_by_salt(
        self, answers: list[tuple[str | None, list[int]]]
    ) -> None:
        past, capacity, told = suffix.PastAnswers(10), 10, list[tuple[str | None, int]]()
        for salt, answer in answers:
            past.add(salt, [*answer, ANSWER_ENDS])
            told += [(salt, token) for token in [*answer, ANSWER_ENDS]]
            kept = {salt: past.of(salt) for salt in (None, "a", "b")}
            total = sum(text.num_tokens for texts in kept.values() for text in texts)
            assert min(len(told), capacity) <= total <= 2 * capacity
            for own, texts in kept.items():
                newest = [token for salt, token in told[-total:] if salt == own]
                assert sum(text.num_tokens for text in texts) == len(newest)
                assert not newest or followed(texts[0], newest[-texts[0].num_tokens :]).length == texts[0].num_tokens
        assert past.of("c") == ()


class TestProposer:
    def state(self, seq_id: int, *tokens: int, salt: str | None = None) -> RowState:
        return RowState(seq_id, np.array(tokens, np.int32), 2, SamplingSpec(), salt)

    def draft(self, proposer: SuffixProposer, state: RowState, k: int) -> list[int]:
        return proposer.propose_all([state], [k])[0]

    def answer(self, proposer: SuffixProposer, *tokens: int, salt: str | None = None) -> None:
        proposer.remember(np.array(tokens, np.int32), salt)

    def test_it_drafts_from_past_answers(self) -> None:
        proposer = SuffixProposer(least=0.1)
        self.answer(proposer, 5, 6, 7, 8)
        assert self.draft(proposer, self.state(2, 3, 4), 4) == [], "nothing in common so far"
        assert self.draft(proposer, self.state(2, 3, 4, 5, 6), 4) == [7, 8], "another answer went on so, and ended"

    def test_what_ended_is_learnt_when_drafts_are_asked_for_and_little_at_a_time(self) -> None:
        """Two answers of half as many tokens, and a long one, which comes in parts."""
        proposer, half = SuffixProposer(), LEARNT_AT_ONCE // 2 - 1
        long = [7, *range(10, 10 + 2 * LEARNT_AT_ONCE), 5]
        for answer in [*range(1000, 1000 + half)], [*range(2000, 2000 + half)], long:
            self.answer(proposer, *answer)
        learnt = [0]
        for _ in range(5):
            proposer.propose_all([], [])
            learnt.append(sum(text.num_tokens for text in proposer._past.of(None)))
        assert learnt == [min(LEARNT_AT_ONCE * i, LEARNT_AT_ONCE + len(long) + 1) for i in range(6)]
        at = LEARNT_AT_ONCE - 3
        assert self.draft(proposer, self.state(9, 1, 2, *long[:at]), 8) == long[at : at + 8], "as if learnt at once"
        assert self.draft(proposer, self.state(9, 1, 2, *long[:-2]), 8) == long[-2:], "it ends where the answer did"

    def test_answers_of_another_salt_are_not_seen(self) -> None:
        proposer = SuffixProposer(least=0.1)
        self.answer(proposer, 5, 6, 7, 8, salt="a")
        for seq_id, (salt, found) in enumerate([("b", []), (None, []), ("a", [7, 8])], 2):
            assert self.draft(proposer, self.state(seq_id, 3, 4, 5, 6, salt=salt), 4) == found, f"salt {salt}"
        self.answer(proposer, 5, 6, 9, 9, salt="b")
        assert self.draft(proposer, self.state(2, 3, 4, 5, 6, salt="b"), 2) == [9, 9], "what ended meanwhile"

    def test_a_place_survives_a_new_generation(self) -> None:
        proposer = SuffixProposer(capacity=5, least=0.1)
        assert self.draft(proposer, self.state(2, 3, 4, 5, 6), 2) == []
        for _ in range(2):
            self.answer(proposer, 5, 6, 7, 8)
        assert self.draft(proposer, self.state(2, 3, 4, 5, 6), 2) == [7, 8]

    def test_the_longer_match_wins(self) -> None:
        proposer = SuffixProposer(least=0.1)
        self.answer(proposer, 4, 5, 6, 7)
        own = self.state(2, 0, 1, 6, 9, 4, 5, 6)
        assert self.draft(proposer, own, 1) == [7], "a past answer knows what followed 4 5 6, its own only 6"
        proposer.finish(2)
        assert not proposer._texts, "a sequence that ended leaves its answer alone"


def test_an_engine_finds_past_answers_of_the_same_salt_alone() -> None:
    """Each request is asked twice; the second time the whole answer is drafted, unless the first had another salt."""
    params, accepted = SamplingParams(seed=1, max_tokens=40, ignore_eos=True), list[int]()
    how = {"method": "suffix", "num_speculative_tokens": 6, "adaptive": False}
    for salts in [("a", "a"), (None, None), ("a", "b"), ("a", None), (None, "a")]:
        with LLM(str(tiny_checkpoint()), device="cpu", max_model_len=64, use_tqdm=False, speculative_config=how) as llm:
            for salt in salts:
                before = speculation_of(llm.engine).num_accepted
                llm.generate([{"prompt_token_ids": [5, 6, 7, 8], "cache_salt": salt}], params)
            accepted.append(speculation_of(llm.engine).num_accepted - before)
    assert accepted[0] == accepted[1] > 25 and max(accepted[2:]) < 5
