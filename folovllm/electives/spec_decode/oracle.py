"""A proposer that knows the answers, and is wrong with a fixed probability: for tests and measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from folovllm.electives.spec_decode.proposer import Proposer, RowState


class Oracle(Proposer):
    """Drafts a known text. Each token is right with a fixed probability, independently of the others.

    So the first j of k draft tokens are accepted with probability ** j, as the cost model assumes.
    """

    def __init__(
        self, texts: Mapping[tuple[int, ...], Sequence[int]], probability: float = 1.0, vocab_size: int = 1 << 30
    ) -> None:
        """`texts`: from a prompt's tokens to those of its answer."""
        self._texts, self._probability, self._vocab_size = texts, probability, vocab_size

    def propose(self, state: RowState, k: int) -> list[int]:
        """Return the known tokens, some of them made wrong; nothing behind the answer's end, or for an unknown prompt."""
        prompt, n = state.token_ids[: state.num_prompt_tokens], len(state.token_ids)
        answer = self._texts.get(tuple(prompt.tolist()), ())
        start = n - state.num_prompt_tokens
        seed = xxhash.xxh64_intdigest(prompt.tobytes())
        return [self._draft_token(token, seed, n + i) for i, token in enumerate(answer[start : start + k])]

    def _draft_token(self, token: int, seed: int, position: int) -> int:
        chance = xxhash.xxh64_intdigest(f"{seed}/{position}".encode()) / 2**64
        return token if chance < self._probability else (token + 1) % self._vocab_size
