"""Who guesses the next tokens of a sequence, and who says how many to guess."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from folovllm.step.draw import DrawSpec, TokenIds


class RowState(NamedTuple):
    """A running sequence, as a proposer sees it."""

    seq_id: int  # no other sequence ever has it
    token_ids: TokenIds  # [n] int32: prompt and answer as far as known, a view. The first guess is for position n
    num_prompt_tokens: int
    draw: DrawSpec  # how its tokens are drawn; with the seed and a position a draft draws with the same noise
    cache_salt: str | None = None  # what is learnt from a sequence may serve those of the same salt


class Work(NamedTuple):
    """What a dear proposer did when it was asked last."""

    num_turns: int  # guesses that it made one after the other
    num_read: int  # tokens of a text that it had to read before, at most


class Proposer(ABC):
    """Guesses tokens. A wrong guess costs time and never changes a text.

    The engine calls, for each sequence: `admit` once, before its first guess; then `propose_all` and `observe`, in turn or
    not; `finish` once, however it ended. While nobody is asked to guess, what was drawn is told late, many tokens at once.
    A sequence that gives way to others is still the same when it comes back: a proposer that holds memory for it may drop
    that at any time, since a `RowState` has all tokens.

    All but `propose` have a body that will do for a proposer without state.

    Attributes:
        is_dear: whether it takes about as long as a step. Such a one may sit out.
        work: of a dear one, what it did in the last `propose_all`; None: nothing.
    """

    is_dear = False
    work: Work | None = None

    @abstractmethod
    def propose(self, state: RowState, k: int) -> Sequence[int]:
        """At most `k` tokens, k >= 1, that may come next in `state`, best guess first to come. Empty: no idea."""

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """`propose` for each of several sequences; an empty list where its k is 0. A draft model runs them together."""
        return [list(self.propose(state, k)) if k else [] for state, k in zip(states, ks, strict=True)]

    def tokens_of(self, guess: Sequence[int]) -> list[int]:
        """The tokens of a guess of the last `propose_all`, which may have names of them (`DraftTokens`). Then it waits for them."""
        return list(guess)

    def admit(self, state: RowState) -> None:
        """A sequence came; its prompt is computed."""

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """These tokens were drawn and kept, one or several, whether they were guessed or not."""

    def num_looks(self) -> int:
        """For how many sequences that get no guesses it wants a `look` now."""
        return 0

    def look(self, states: Sequence[RowState]) -> None:
        """Sequences that got no guesses of late, as they are now."""

    def finish(self, seq_id: int) -> None:
        """A sequence that was admitted has ended; what is kept for it alone can go."""

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        """The answer of a sequence that ended by itself and was never admitted: nobody was asked about it."""

    def close(self) -> None:
        """The engine was closed: what is on a device can go. Nothing is asked any more."""


class InTurn(Proposer):
    """Asks one proposer after the other, until each sequence has a guess."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = proposers
        self.is_dear = any(proposer.is_dear for proposer in proposers)

    def propose(self, state: RowState, k: int) -> list[int]:
        """As `Proposer`."""
        return next((guess for one in self._proposers if (guess := list(one.propose(state, k)))), [])

    def propose_all(self, states: Sequence[RowState], ks: Sequence[int]) -> list[list[int]]:
        """As `Proposer`."""
        found: list[list[int]] = [[] for _ in states]
        self.work = None
        for proposer in self._proposers:
            left = [0 if guess else k for guess, k in zip(found, ks, strict=True)]
            if any(left):
                more = proposer.propose_all(states, left)
                found = [guess or other for guess, other in zip(found, more, strict=True)]
                self.work = self.work or proposer.work
        return found

    def tokens_of(self, guess: Sequence[int]) -> list[int]:
        """As `Proposer`."""
        for proposer in self._proposers:
            guess = proposer.tokens_of(guess)
        return list(guess)

    def admit(self, state: RowState) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.admit(state)

    def observe(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.observe(seq_id, token_ids)

    def look(self, states: Sequence[RowState]) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.look(states)

    def num_looks(self) -> int:
        """As `Proposer`."""
        return max(proposer.num_looks() for proposer in self._proposers)

    def finish(self, seq_id: int) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.finish(seq_id)

    def close(self) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.close()

    def remember(self, answer: TokenIds, cache_salt: str | None) -> None:
        """As `Proposer`."""
        for proposer in self._proposers:
            proposer.remember(answer, cache_salt)


class Depth(ABC):
    """Says how many tokens to guess, and learns whether it paid.

    All but `choose` have a body that does nothing.

    Attributes:
        rest: after `choose` has said 0 for all, steps for which it need not be asked again; at first, before it is asked.
    """

    rest = 0

    @abstractmethod
    def choose(self, seq_ids: Sequence[int]) -> list[int]:
        """How many tokens to guess for each sequence of the coming step; 0 for all: the engine steps as if it knew no guesses.

        It is asked before the newest tokens are known where steps overlap. The engine may guess fewer, where the answer
        or the step's budget has no room.
        """

    def observe(self, seq_id: int, num_guessed: int, num_accepted: int) -> None:
        """So many guesses were checked in a step, and so many of them were right."""

    def note_form(self, seq_id: int) -> None:
        """The answer of a sequence has a form. It may be said again; it counts until `finish`."""

    def observe_choice(self, num_seqs: int, seconds: float) -> None:
        """To find out that nobody of so many sequences gets guesses took so long, but for looks; `rest` may get longer."""

    def observe_guessing(self, num_guesses: int, seconds: float) -> None:
        """The proposer took so long for so many guesses in turn, of all sequences of a step together.

        `num_guesses` is 0 if it had to catch up with a text first, which says nothing of the guesses to come.
        """

    def observe_step(
        self, num_seqs: int, num_tokens: int, num_guessed: int, num_right: int, seconds: float, asked: bool
    ) -> None:
        """A step of so many sequences and tokens, guesses among them, took so long, from its schedule to its tokens.

        `num_right` of the guesses were right. `asked`: it was to have guesses, whether there were any then or not.
        """

    def finish(self, seq_id: int) -> None:
        """A sequence has ended."""


class FixedDepth(Depth):
    """The same number for all, always."""

    def __init__(self, k: int) -> None:
        self._k = k

    def choose(self, seq_ids: Sequence[int]) -> list[int]:
        """As `Depth`."""
        return [self._k] * len(seq_ids)
