"""The runs of tokens that an answer must not hold (`SamplingParams.bad_words`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from folovllm.engine.inputs import encode
from folovllm.engine.require import require
from folovllm.sample.sampling_row import MAX_BAD_TOKENS, MAX_BAD_WORDS
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARS_OF_TOKEN = 256  # of the longest in use; blanks, mostly


def forbidden_runs(
    tokenizer: PreTrainedTokenizerBase, params: SamplingParams, eos_token_ids: Collection[int]
) -> tuple[tuple[int, ...], ...]:
    """The tokens of the bad words. Raises ValueError where they are too many, or nothing is left to sample."""
    runs = bad_word_tokens(tokenizer, params.bad_words) if params.bad_words else ()
    if params.allowed_token_ids is not None:
        never = {run[0] for run in runs if len(run) == 1}
        if params.min_tokens:
            never |= {*eos_token_ids, *params.stop_token_ids}
        left = set(params.allowed_token_ids) - never
        require(bool(left), "bad_words or min_tokens forbid all of allowed_token_ids: nothing could be sampled")
    return runs


def bad_word_tokens(tokenizer: PreTrainedTokenizerBase, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The runs of tokens that write the words, each run once.

    A word is written as at the start of a text, and as after a space, unless that is a space and then the same tokens.
    (vLLM leaves the second way out wherever it has more tokens or fewer, and so lets " curious" pass for "curious".)
    """
    _require_few(len(words), sum(map(len, words)) // MAX_CHARS_OF_TOKEN)  # before any work
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        texts = word.lstrip(), " " + word.lstrip()
        plain, spaced = (tuple(encode(tokenizer, text, add_special_tokens=False)) for text in texts)
        require(bool(plain), f"the bad word {word!r} has no tokens")
        runs[plain] = None
        if spaced[1:] != plain:
            runs[spaced] = None
    _require_few(len(runs), sum(map(len, runs)))
    return tuple(runs)


def _require_few(num_words: int, num_tokens: int) -> None:
    """Raise ValueError if a row of the device has no room for so many bad words of so many tokens in all."""
    fits = num_words <= MAX_BAD_WORDS and num_tokens <= MAX_BAD_TOKENS
    most = f"at most {MAX_BAD_WORDS} ways to write them, with {MAX_BAD_TOKENS} tokens in all"
    require(fits, f"bad_words are too many: {most}")
