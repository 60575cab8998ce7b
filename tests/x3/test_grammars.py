"""Drafts and the grammars of answers: what a grammar rules out, and where it leads nowhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from folovllm.electives.spec_decode.policy import LengthPolicy
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.electives.spec_decode.speculation import Speculation
from folovllm.electives.structured_output import guidance
from folovllm.electives.structured_output import manager as manager_module
from folovllm.electives.structured_output.grammar_matcher import Bitmask, Grammar, GrammarMatcher
from folovllm.electives.structured_output.guidance import GuidanceGrammar
from folovllm.electives.structured_output.manager import StructuredOutputManager
from folovllm.electives.structured_output.params import StructuredOutputsParams
from folovllm.sample.sampling_row import mask_width
from folovllm.step.bitmasks import TokenBitmasks
from folovllm.step.schedule import ScheduledSequence, SchedulerOutput
from tests.helpers import VOCAB_SIZE, tiny_tokenizer
from tests.x3.drafting_loop import sequence

ANY, LAST, NOTHING_BEHIND = 0b1111, 3, 2


class DeadEnd(Grammar):
    """Allows the tokens 0 to 3. Behind a 2 it finds none, and is not complete."""

    is_dead = False

    def fill(self, lines: Bitmask, drafts: Sequence[int]) -> None:
        for words, is_dead in zip(lines, [self.is_dead, *(token == NOTHING_BEHIND for token in drafts)], strict=True):
            words[:] = 0 if is_dead else ANY

    def accept_token(self, token_id: int) -> bool:
        self.is_dead = token_id == NOTHING_BEHIND
        return token_id <= LAST


def manager_of(seq: Any) -> StructuredOutputManager:
    manager = StructuredOutputManager(None, 32)
    manager._matchers[seq] = GrammarMatcher(DeadEnd(), end_ids=[9])
    return manager


def step(seq: Any, drafts: list[int]) -> SchedulerOutput:
    tokens = np.array([0, *drafts], np.int32)
    return SchedulerOutput((ScheduledSequence(seq.seq_id, 5, 2, 2 + len(tokens), tokens, (), 0, len(tokens), None),))


def test_a_grammar_is_asked_for_no_more_than_it_allows_and_never_for_an_end() -> None:
    seq = sequence([1, 1, 1], 8)
    manager = manager_of(seq)
    assert manager.trim(seq, [1, 3, 4, 1]) == [1, 3]
    assert manager.trim(seq, [1, 9, 1]) == [1], "behind an end there is nothing to draft"


def test_masks_of_a_steps_samples() -> None:
    masks = TokenBitmasks(np.array([3, 3, 3, 2, 2], np.int32), np.arange(5, dtype=np.int32)[:, None])
    bits = masks.of_samples(np.array([3, 3, 3, 1, 2, 2], np.int32))
    assert bits[:, 0].tolist() == [0, 1, 2, -1, 3, 4], "each sample of a row has its own, and row 1 has none"


def test_what_is_sampled_where_the_grammar_cannot_be_reached_does_not_count() -> None:
    """The answer ends there as it does without drafts: by the step that finds nothing it may sample."""
    seq = sequence([1, 1, 1], 8)
    manager = manager_of(seq)
    masks = manager.bitmasks(step(seq, [1, NOTHING_BEHIND, 1]), [seq])
    assert masks.bits[:3].tolist() == [[ANY], [ANY], [1 << 9]], "behind the second draft there is but an end"
    sampled = [[1, NOTHING_BEHIND, 9]]
    manager.accept_tokens([seq], sampled)
    assert sampled == [[1, NOTHING_BEHIND]] and not manager.broken([seq])
    manager.bitmasks(step(seq, []), [seq])
    assert not manager.broken([seq]), "tokens before these masks' own may be on their way"
    sampled = [[9]]
    manager.accept_tokens([seq], sampled)
    assert sampled == [[]] and manager.broken([seq]) == [seq]


def with_grammar(max_tokens: int, stop_token_ids: Sequence[int] = (), **grammar: Any) -> Any:
    """A sequence of three tokens whose answer has a grammar."""
    return sequence(
        [1, 1, 1], max_tokens, structured_outputs=StructuredOutputsParams(**grammar), stop_token_ids=[*stop_token_ids]
    )


OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["cd", "ce"]}}, "required": ["b"]}
GRAMMARS: list[dict[str, Any]] = [
    {"regex": r"(abc|abd)+(ef)?g{2,5}"}, {"json": OBJECT}, {"choice": ["abcabc", "abdeee"]},
]  # fmt: skip


@pytest.mark.parametrize("few", [16, 0], ids=["in turn", "on threads"])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: next(iter(grammar)))
def test_masks_behind_drafts_as_one_by_one(grammar: dict[str, Any], few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along texts that are sampled at random from the masks; some drafts are what comes, some are not allowed."""
    monkeypatch.setattr(guidance, "FEW", few)
    rng = random.Random(1)
    manager = StructuredOutputManager(tiny_tokenizer(), VOCAB_SIZE)
    num_forced = 0
    for _ in range(6):
        seq, other = with_grammar(40, **grammar), with_grammar(40, **GRAMMARS[0])
        manager.add([seq])
        manager.add([other])
        text, place = [], manager._matchers[seq].copy()
        while not place.is_over and len(text) < 30:
            text.append(rng.choice(allowed_by(place)))
            place.accept_token(text[-1])
        end, matcher = len(text) - 1, manager._matchers[seq]  # the last one ends the answer: it is no draft
        for i in range(end):
            drafts = text[i : i + rng.randint(1, 6)][: end - i]
            if rng.random() < 0.3:
                drafts[-1] = rng.randrange(VOCAB_SIZE)
            num_forced += len(forced := manager.forced(seq, 3))
            assert text[i : i + len(forced)] == forced[: end - i]
            two = SchedulerOutput((*step(seq, drafts).scheduled_seqs, *step(other, []).scheduled_seqs))
            masks = manager.bitmasks(two, [seq, other])
            assert ids_of(masks.bits[-1]) == allowed_by(manager._matchers[other])
            at = matcher.copy()
            for level, token in enumerate([*manager.trim(seq, drafts), text[i]]):
                assert ids_of(masks.bits[level]) == allowed_by(at)
                at.accept_token(token)
            matcher.accept_token(text[i])
    assert num_forced or "choice" in grammar


def test_a_stop_token_that_is_text_completes_no_grammar() -> None:
    """The grammar allows "a" all the way. That the request stops at an "a" does not mean that the answer may end."""
    a, b, c = tiny_tokenizer().encode("abc")
    manager, seq = StructuredOutputManager(tiny_tokenizer(), VOCAB_SIZE), with_grammar(8, [a], regex="[a-c]{3}")
    manager.add([seq])
    masks = manager.bitmasks(step(seq, [b, c, b]), [seq])
    assert [ids_of(words) for words in masks.bits] == [[a, b, c]] * 3 + [sorted([a, *seq.eos_token_ids])]


def test_no_end_before_min_tokens_where_the_grammar_goes_on() -> None:
    a, b = tiny_tokenizer().encode("ab")
    manager, seq = StructuredOutputManager(tiny_tokenizer(), VOCAB_SIZE), with_grammar(8, regex="ab*")
    seq.request.params.min_tokens = 3
    manager.add([seq])
    matcher, ends = manager._matchers[seq], sorted(seq.eos_token_ids)
    for token, then in [(a, [b]), (b, [b]), (b, sorted([b, *ends]))]:
        matcher.accept_token(token)
        assert allowed_by(matcher) == then


@pytest.mark.parametrize("prepared", [False, True])
def test_requests_to_a_model_without_ends_have_each_their_own(prepared: bool) -> None:
    """What ends one request is text of another, whichever comes first."""
    a, b, c, x, y = tiny_tokenizer().encode("abcxy")
    manager = StructuredOutputManager(tiny_tokenizer(), VOCAB_SIZE)
    if prepared:
        manager.prepare([])
    for end, other in [(x, y), (y, x), (x, y), *((int(id_), x) for id_ in tiny_tokenizer().encode("0123456789"))]:
        seq = with_grammar(8, [end], regex="[a-cxy][a-c]{2}")
        seq.eos_token_ids = frozenset()
        manager.add([seq])
        matcher, seen = manager._matchers[seq], []
        for token in [other, b, c]:
            seen.append(allowed_by(matcher))
            matcher.accept_token(token)
        assert other in seen[0] and {a, b, c} < {*seen[0]}
        assert [*seen[1:], allowed_by(matcher)] == [[a, b, c], [a, b, c], [end]]
        masks = manager.bitmasks(step(seq, []), [seq])
        assert ids_of(masks.bits[0]) == [end]


def allowed_by(matcher: GrammarMatcher) -> list[int]:
    """What may come, each place asked by itself."""
    lines = np.full((1, mask_width(VOCAB_SIZE)), -1, np.int32)
    if matcher.grammar is not None:
        matcher.grammar.fill(lines, [])
    matcher.copy().finish(lines)
    return ids_of(lines[0])


def ids_of(words: Bitmask) -> list[int]:
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE].nonzero()[0].tolist()


def test_a_grammar_that_was_asked_for_before_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_ = GuidanceGrammar.compile
    monkeypatch.setattr(GuidanceGrammar, "compile", lambda *grammar: (compiled.append(grammar), compile_(*grammar))[1])
    monkeypatch.setattr(manager_module, "MOST_GRAMMARS", 2)
    manager = StructuredOutputManager(tiny_tokenizer(), VOCAB_SIZE)
    for letter in "aabababcba":  # b is kept, for it was used after a
        seq = with_grammar(8, regex=letter)
        manager.add([seq])
        assert manager._matchers[seq].forced() == tiny_tokenizer().encode(letter)
    assert [grammar.regex for grammar, _ in compiled] == ["a", "b", "c", "a"]


class Ones(Proposer):
    """Always drafts the same."""

    def propose(self, state: RowState, k: int) -> list[int]:
        return [1] * k


class Forces:
    """A grammar that goes on with these tokens and nothing else, and then allows all."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def forced(self, seq: Any, most: int) -> list[int]:
        return self.tokens[:most]

    def trim(self, seq: Any, draft: list[int]) -> list[int]:
        right = next((i for i, (g, t) in enumerate(zip(draft, self.tokens, strict=False)) if g != t), len(draft))
        return draft if right >= len(self.tokens) else draft[:right]


class Noting(LengthPolicy):
    """Notes what came of drafts, and says whether certain tokens pay."""

    def __init__(self, k: int, pays: bool = True) -> None:
        super().__init__(k)
        self.seen, self._pays = list[tuple[int, int]](), pays

    def pays(self, num_seqs: int, num_tokens: int) -> bool:
        return self._pays

    def observe(self, seq_id: int, num_draft_tokens: int, num_accepted: int) -> None:
        self.seen.append((num_draft_tokens, num_accepted))


def test_a_draft_that_the_grammar_rejects_counts_as_none() -> None:
    seq, policy = sequence([1, 1, 1], 8), Noting(2)
    seq.num_computed_tokens = 2
    manager = StructuredOutputManager(None, 32)
    manager._matchers[seq] = GrammarMatcher(DeadEnd(), end_ids=[1])
    assert Speculation(Ones(), policy, manager).propose([seq], 8, 0) == {}
    assert policy.seen == [(0, 0)], "or it would be asked again and again"


@pytest.mark.parametrize(("forced", "draft", "seen"), [
    ([], [1, 1, 1], []),  # nothing is forced: the proposer's draft
    ([7, 8], [7, 8], [(0, 0)]),  # the proposer says something else: the grammar's tokens, and no draft
    ([1, 1, 1, 1], [1, 1, 1], [(0, 0)]),  # it says no more than the grammar
    ([1], [1, 1, 1], []),  # it goes on behind what is forced
])  # fmt: skip
def test_jump_forward_tokens_and_drafts(forced: list[int], draft: list[int], seen: list[tuple[int, int]]) -> None:
    seq = with_grammar(8, regex=".*")
    seq.num_computed_tokens, policy = 2, Noting(3)
    speculation = Speculation(Ones(), policy, Forces(forced))
    assert speculation.propose([seq], 8, 0) == {seq.seq_id: draft}
    assert policy.seen == seen
    speculation.verified(seq, len(draft), 1)
    assert policy.seen == (seen or [(len(draft), 1)]), "what a grammar forces says nothing of the proposer"


@pytest.mark.parametrize("pays", [True, False])
def test_jump_forward_tokens_go_into_a_step_where_they_pay(pays: bool) -> None:
    class Silent(Proposer):
        def propose(self, state: RowState, k: int) -> list[int]:
            return []

    seq = with_grammar(8, regex=".*")
    seq.num_computed_tokens = 2
    speculation = Speculation(Silent(), Noting(3, pays), Forces([5, 6]))
    assert speculation.propose([seq], 8, 0) == ({seq.seq_id: [5, 6]} if pays else {})
    assert speculation.propose_from <= 1, "the next step is asked for as well"
