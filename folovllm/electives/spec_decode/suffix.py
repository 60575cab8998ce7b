"""Drafts from texts written before: the longest end of a text that occurred earlier, and what followed it then.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975), with suffix automata in place of its suffix trees.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
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
    """The latest answers, each under its cache salt, in two generations: when the younger is full, the older one is forgotten.

    So at most `2 * capacity` tokens are kept, and always the last `capacity`, or all there were. A request sees the answers of its
    own salt alone, so its speed tells nothing of other salts' answers.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._younger, self._older = (defaultdict[str | None, SuffixAutomaton](SuffixAutomaton) for _ in range(2))
        self._num_younger = 0  # tokens in the younger generation

    def add(self, salt: str | None, answer: Iterable[int]) -> None:
        """Remember a part of an answer; `ANSWER_ENDS` stands behind the last."""
        for token in answer:
            if self._num_younger == self._capacity:
                self._older, self._younger = self._younger, defaultdict(SuffixAutomaton)
                self._num_younger = 0
            self._younger[salt].append(token)
            self._num_younger += 1

    def of(self, salt: str | None) -> Generations:
        """Return what is kept under a salt, the younger generation first."""
        return tuple(generation[salt] for generation in (self._younger, self._older) if salt in generation)


class Memory:
    """What is kept for one running sequence: its own text, and where it stands in past answers."""

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self._recent: list[int] = []
        self._generations: Generations = ()
        self._places: list[Place] = []

    def extend(self, token_ids: list[int]) -> None:
        """Add tokens to the text."""
        for token in token_ids:
            self.own.append(token)
        self._recent = (self._recent + token_ids)[-RECENT:]
        self._follow(token_ids)

    def propose(self, generations: Generations, k: int, least: float) -> SuffixDraft:
        """Return the draft with the best score: from the text itself, or from a generation of past answers."""
        if self._generations != generations:
            self._generations, self._places = generations, [NOWHERE] * len(generations)
            self._follow(self._recent)
        texts = [(self.own, self.own.longest_repeat()), *zip(generations, self._places, strict=True)]
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
        self._past, self._least = PastAnswers(capacity), least
        # Answers, or what is left of one, that are not yet in `_past`, with their salts.
        self._ended: deque[tuple[str | None, TokenIds]] = deque(maxlen=64)
        self._texts: dict[int, Memory] = {}

    def propose(self, state: RowState, k: int) -> list[int]:
        """Return as many tokens as are likely enough."""
        if state.seq_id not in self._texts:
            self._texts[state.seq_id] = Memory()
        text = self._texts[state.seq_id]
        text.extend(state.token_ids[text.own.num_tokens :].tolist())
        return text.propose(self._past.of(state.cache_salt), k, self._least).token_ids

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        self._learn()
        return super().propose_all(states, ks)

    def finish(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        self._ended.append((cache_salt, answer))

    def _learn(self) -> None:
        """Remember answers that ended, the oldest first, `LEARNT_AT_ONCE` tokens of them."""
        left = LEARNT_AT_ONCE
        while self._ended and left > 0:
            salt, answer = self._ended.popleft()
            self._past.add(salt, answer[:left].tolist())
            if len(answer) >= left:
                self._ended.appendleft((salt, answer[left:]))
            else:
                self._past.add(salt, [ANSWER_ENDS])
            left -= len(answer) + 1
