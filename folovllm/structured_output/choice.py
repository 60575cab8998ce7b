"""Which tokens may come next where the answer must be one of a few texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def choice_mask(
    vocabulary: Mapping[bytes, Sequence[int]], choices: Collection[bytes], so_far: bytes, end_ids: Sequence[int]
) -> list[int]:
    """The tokens with which an answer that is `so_far` may go on if it must become one of `choices`.

    A token may come if `so_far` and its bytes together begin one of the choices, or are all of it. How a choice is cut into
    tokens is left to the model: "yes" may come as "yes", as "y" and "es", or letter by letter. Where `so_far` is one of the
    choices the answer may end, beside going on where a longer choice begins with it.

    A vocabulary has 150,000 tokens and a choice a few bytes: so look up what each choice can go on with, and do not try
    every token.

    Args:
        vocabulary: token ids by the bytes that they stand for; several tokens may have the same.
        choices: what the answer may be, none of them empty.
        so_far: the bytes of the answer; they begin one of the choices.
        end_ids: tokens that end an answer.

    Returns:
        Their ids, ascending, each once.
    """
    allowed = set(end_ids) if so_far in choices else set()
    for choice in choices:
        if choice.startswith(so_far):
            rest = choice[len(so_far) :]
            for length in range(1, len(rest) + 1):
                allowed.update(vocabulary.get(rest[:length], ()))
    return sorted(allowed)
