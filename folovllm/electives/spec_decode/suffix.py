"""Drafts from texts written before: the longest end of a text that occurred earlier, and what followed it then.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975), with suffix automata in place of its suffix trees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from folovllm.electives.spec_decode.automaton import NOWHERE, Place, SuffixAutomaton
from folovllm.electives.spec_decode.proposer import Proposer, RowState
from folovllm.step.schedule import TokenIds

ANSWER_ENDS = -1  # stands behind a past answer; no token has this id
LEARNT_AT_ONCE = 64  # tokens of past answers that are learnt in one step, which waits for that
RECENT = 64  # tokens of a text that are looked for in past answers

Generations = tuple[SuffixAutomaton, ...]


class SuffixDraft(NamedTuple):
    """Draft tokens, and how many of them are expected to be accepted."""

    token_ids: list[int]
    score: float


def most_frequent(text: SuffixAutomaton, place: Place, k: int, least: float) -> SuffixDraft:
    """Return the tokens that followed most often, from `place` on: at most `k`, none behind the end of an answer.

    The chance of the i-th draft token is a product of two numbers: the frequencies of it and of those before it among the
    tokens that followed there; and L / (L + i), where L tokens matched. The draft ends where that is below `least`. So it has
    at most L * (1 / least - 1) tokens, the paper's rule: a short match gives a short draft.
    """
    draft: list[int] = []
    matched, frequency, score = place.length, 1.0, 0.0
    while len(draft) < k and place.length:
        counts = text.following(place)
        if not counts:  # the end of the text; a shorter end of it occurs earlier
            place = text.shorter(place)
            continue
        token = max(reversed(counts), key=counts.__getitem__)  # of equals, the newest
        frequency *= counts[token] / sum(counts.values())
        chance = frequency * matched / (matched + len(draft) + 1)
        if token == ANSWER_ENDS or chance < least:
            break
        draft.append(token)
        score += chance
        place = text.follow(place, token)
    return SuffixDraft(draft, score)


class PastAnswers:
    """The latest answers in two generations: when the younger one is full, the older one is forgotten.

    So at most `2 * capacity` tokens are kept, and always the last `capacity`, or all there were.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.generations: Generations = (SuffixAutomaton(), SuffixAutomaton())  # younger, older

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are kept."""
        return sum(text.num_tokens for text in self.generations)

    def add(self, answer: Iterable[int]) -> None:
        """Remember a part of an answer; `ANSWER_ENDS` stands behind the last."""
        for token in answer:
            if self.generations[0].num_tokens == self._capacity:
                self.generations = SuffixAutomaton(), self.generations[0]
            self.generations[0].append(token)


class AnswersBySalt:
    """Past answers by cache salt. A request sees those of its own salt alone, so its speed tells nothing of other salts' answers.

    There are at most `2 * capacity` tokens in all. Beyond that, the salts whose last answer is longest ago are forgotten.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_salt: dict[str | None, PastAnswers] = {}  # the one with the newest answer comes last
        self.num_tokens = 0

    def add(self, salt: str | None, answer: Iterable[int]) -> None:
        """Remember a part of an answer (`PastAnswers.add`)."""
        past = self._by_salt.pop(salt, None) or PastAnswers(self._capacity)
        self._by_salt[salt] = past
        self.num_tokens -= past.num_tokens
        past.add(answer)
        self.num_tokens += past.num_tokens
        while self.num_tokens > 2 * self._capacity:
            self.num_tokens -= self._by_salt.pop(next(iter(self._by_salt))).num_tokens

    def generations(self, salt: str | None) -> Generations:
        """Return what is kept under a salt, the younger generation first."""
        past = self._by_salt.get(salt)
        return past.generations if past else ()


class Memory:
    """What is kept for one running sequence: its own text, and where it stands in past answers."""

    def __init__(self, past: Callable[[], Generations]) -> None:
        """`past` gives the generations of past answers that it may look at."""
        self.own = SuffixAutomaton()
        self._past = past
        self._recent: list[int] = []
        self._generations: Generations = ()
        self._places: list[Place] = []

    def extend(self, token_ids: list[int]) -> None:
        """Add tokens to the text."""
        for token in token_ids:
            self.own.append(token)
        self._recent = (self._recent + token_ids)[-RECENT:]
        self._follow(token_ids)

    def propose(self, k: int, least: float) -> SuffixDraft:
        """Return the draft with the best score: from the text itself, or from a generation of past answers."""
        if self._generations != (generations := self._past()):
            self._generations = generations
            self._places = [NOWHERE] * len(self._generations)
            self._follow(self._recent)
        texts = [(self.own, self.own.longest_repeat()), *zip(self._generations, self._places, strict=True)]
        return max((most_frequent(*text, k, least) for text in texts), key=lambda draft: draft.score)

    def _follow(self, token_ids: list[int]) -> None:
        for i, past in enumerate(self._generations):
            for token in token_ids:
                self._places[i] = past.follow(self._places[i], token)


class SuffixProposer(Proposer):
    """Suffix decoding for each sequence: from its own text and from the answers that ended before.

    Past answers serve requests of the same cache salt: those with a salt find the answers of that salt alone, those without one
    the answers of requests without one, so the speed of one of these can tell what another was answered.
    """

    def __init__(self, capacity: int = 32_768, least: float = 0.2) -> None:
        """`capacity`: tokens of past answers that are always kept; twice as many may be, which take some 40 MB.

        `least`: a draft ends before a token whose chance is smaller.
        """
        self._past, self._least = AnswersBySalt(capacity), least
        # Answers, or the list of what is left of one, not yet in `_past`, with their salts.
        self._ended: deque[tuple[str | None, TokenIds | list[int]]] = deque(maxlen=64)
        self._texts: dict[int, Memory] = {}
        self._answers: dict[int, tuple[str | None, list[int]]] = {}  # of running sequences, with their salts

    def admit(self, state: RowState) -> None:
        self._answers[state.seq_id] = state.cache_salt, state.token_ids[state.num_prompt_tokens :].tolist()

    def propose(self, state: RowState, k: int) -> list[int]:
        """Return as many tokens as are likely enough."""
        if state.seq_id not in self._texts:
            self._texts[state.seq_id] = Memory(partial(self._past.generations, state.cache_salt))
        text = self._texts[state.seq_id]
        text.extend(state.token_ids[text.own.num_tokens :].tolist())
        return text.propose(k, self._least).token_ids

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        self._learn()
        return super().propose_all(states, ks)

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._answers[seq_id][1].extend(token_ids)

    def finish(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
        salt, answer = self._answers.pop(seq_id)
        self._ended.append((salt, [*answer, ANSWER_ENDS]))

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        self._ended.append((cache_salt, answer))

    def _learn(self) -> None:
        """Remember answers that ended, the oldest first, `LEARNT_AT_ONCE` tokens of them."""
        left = LEARNT_AT_ONCE
        while self._ended and left:
            salt, ended = self._ended.popleft()
            answer = ended if isinstance(ended, list) else [*ended.tolist(), ANSWER_ENDS]
            self._past.add(salt, answer[:left])
            if answer[left:]:
                self._ended.appendleft((salt, answer[left:]))
            left -= min(left, len(answer))
