"""Prompt lookup: what followed the same few tokens the last time may follow again (Saxena 2023)."""

from __future__ import annotations

from collections.abc import Iterable

from folovllm.electives.spec_decode.proposer import Proposer, RowState


class Lookup:
    """A text that grows, and where each run of `shortest` to `longest` tokens last occurred in it.

    Invariant: `_after[run]` is the index of the token that followed the latest occurrence of `run`. The run with which
    the text ends is noted only when a token follows it, so that a search never finds the end of the text itself.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(shortest, longest + 1)
        self._after: dict[tuple[int, ...], int] = {}
        self.tokens: list[int] = []

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add tokens to the text. The work for a token does not depend on how long the text is.

        For each token: all runs that end just before it, of every length that the text so far has room for, are now
        followed by it; then it is part of the text.
        """
        tokens = self.tokens
        for token in token_ids:
            end = len(tokens)
            for n in self._lengths:
                if n <= end:
                    self._after[tuple(tokens[end - n :])] = end
            tokens.append(token)

    def propose(self, k: int) -> list[int]:
        """Return the `k` tokens that followed the longest run with which the text ends, where it occurred last; [] if never.

        Here too the work does not depend on how long the text is.

        Near the end of the text there are fewer than `k` to copy: the copy then goes on with what it has copied itself,
        as in LZ77. So after "ab ab" comes "ab ab ab".
        """
        end = len(self.tokens)
        for n in reversed(self._lengths):
            start = self._after.get(tuple(self.tokens[end - n :])) if n <= end else None
            if start is not None:
                return [self.tokens[start + i % (end - start)] for i in range(k)]
        return []


class NgramProposer(Proposer):
    """Prompt lookup for each sequence that it was asked about."""

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        """Runs of `longest` tokens are looked for first, then shorter ones; vLLM's `prompt_lookup_max` and `_min`."""
        self._shortest, self._longest = shortest, longest
        self._texts: dict[int, Lookup] = {}

    def propose(self, state: RowState, k: int) -> list[int]:
        """Return `k` tokens or none."""
        text = self._texts.get(state.seq_id)
        if text is None:
            text = self._texts[state.seq_id] = Lookup(self._shortest, self._longest)
        text.extend(state.token_ids[len(text.tokens) :].tolist())
        return text.propose(k)

    def finish(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)
