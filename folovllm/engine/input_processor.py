"""Turns what a user passes into a `Request` and its sequences, or into an error before any work starts."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from typing import TYPE_CHECKING, Any

from folovllm.engine.detokenizer import IncrementalDetokenizer, make_detokenizer
from folovllm.engine.detokenizer_stream import make_stream_detokenizer
from folovllm.inputs import Prompt, PromptParts, parse_prompt
from folovllm.models.files import eos_token_ids
from folovllm.request import Request, Sequence
from folovllm.require import is_whole, require
from folovllm.sample.sampling_row import MAX_BAD_TOKENS, MAX_BAD_WORDS
from folovllm.sampling_params import SamplingParams
from folovllm.setup import EngineSetup
from folovllm.spelling import Spelling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARS_OF_TOKEN = 256  # of the longest in use; blanks, mostly


class InputProcessor:
    """Tokenizes, validates, and splits a request of `n` answers into `n` sequences.

    What fits into the context fits into the cache: a cache in which a sequence of `max_model_len` tokens could not end is refused earlier.
    """

    def __init__(self, setup: EngineSetup, tokenizer: PreTrainedTokenizerBase) -> None:
        self._setup = setup
        self._tokenizer = tokenizer
        self._eos = eos_token_ids(setup.path, setup.hf_config, tokenizer)
        self._seeds = random.Random(setup.config.seed)  # for requests that bring none

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self._tokenizer)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The model's own end-of-text ids."""
        return self._eos

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0, cache_salt: str | None = None
    ) -> list[Sequence]:
        """Returns the sequences of a request, one for each answer: it is tokenized and checked here, once.

        Raises:
            ValueError: the prompt is empty, too long for the context, or holds an id outside 0..V-1; or something is of
                the wrong kind, or more than the engine allows.
        """
        require(isinstance(params, SamplingParams), f"sampling parameters are a SamplingParams, not {params!r}")
        fits = is_whole(priority) and -(2**63) <= priority < 2**63
        require(fits, f"priority must be a whole number from -2**63 to 2**63 - 1, not {priority!r}")
        params, parts = params.clone(), parse_prompt(prompt)  # the caller's own may change while the request runs
        cache_salt = parts.cache_salt if cache_salt is None else cache_salt
        require(cache_salt is None or _is_text(cache_salt), f"cache_salt must be a text, not {cache_salt!r}")
        self.check_amounts(params)
        token_ids = self._truncate(self._tokenize(parts, params), params)
        self._validate(token_ids, params)
        room = self._setup.max_model_len - len(token_ids) + params.prompt_only
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            bad_words=self._bad_words(params),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=self._eos,
            priority=priority,
            cache_salt=cache_salt,
            prompt=parts.text,
        )
        return self.sequences(request)

    def sequences(self, request: Request) -> list[Sequence]:
        """Returns the sequences of a request that was checked before, by this processor or in another process."""
        params = request.params
        return [Sequence(request, self._make_detokenizer(params), index) for index in range(params.n)]

    def _make_detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer:
        make = make_stream_detokenizer if self._setup.config.packed_steps else make_detokenizer
        detokenizer = make(self._tokenizer, params)
        if params.detokenize and (params.logprobs, params.prompt_logprobs) != (None, None):
            detokenizer.spelling = self._spelling
        return detokenizer

    def _tokenize(self, parts: PromptParts, params: SamplingParams) -> list[int]:
        if parts.token_ids is not None:
            return parts.token_ids
        if params.truncate_prompt_tokens is not None:  # only the end is kept, and it takes all to know it
            return encode(self._tokenizer, parts.text or "")
        return encode_within(self._setup.max_model_len, self._tokenizer, parts.text or "")

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The end of the prompt that the request wants to keep."""
        most = params.truncate_prompt_tokens
        return token_ids if most is None else token_ids[-(self._setup.max_model_len - 1 if most == -1 else most) :]

    def check_amounts(self, params: SamplingParams) -> None:
        """Raise ValueError if a request asks for more of something than the engine gives."""
        config = self._setup.config
        for name, asked, most in (
            ("n", params.n, config.max_n),
            ("logprobs", params.logprobs or 0, config.max_logprobs),
            ("prompt_logprobs", params.prompt_logprobs or 0, config.max_logprobs),
        ):
            limit = f"max_{name.removeprefix('prompt_')}"
            require(
                asked <= most,
                f"{name} is {asked}, and this engine gives {most} at most: ask for less, or raise {limit}",
            )

    def _validate(self, token_ids: list[int], params: SamplingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        limit, vocab_size = self._setup.max_model_len, self._setup.vocab_size
        if len(token_ids) >= limit + params.prompt_only:
            raise too_long(str(len(token_ids)), limit)
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            bad = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise ValueError(f"token id {bad} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")
        for name, ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
            ("logit_bias", params.logit_bias or ()),
        ):
            if wrong := [t for t in ids if not 0 <= t < vocab_size]:
                raise ValueError(f"{name} must lie between 0 and {vocab_size - 1}, and {wrong[0]} does not")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of the bad words. Raises ValueError where they are too many, or nothing is left to sample."""
        runs = bad_word_tokens(self._tokenizer, params.bad_words) if params.bad_words else ()
        if params.allowed_token_ids is not None:
            never = {run[0] for run in runs if len(run) == 1}
            if params.min_tokens:
                never |= {*self._eos, *params.stop_token_ids}
            left = set(params.allowed_token_ids) - never
            require(bool(left), "bad_words or min_tokens forbid all of allowed_token_ids: nothing could be sampled")
        return runs


def encode(tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> list[int]:
    """The token ids of a text. Raises ValueError if it holds half a character (a lone surrogate), which has no bytes."""
    try:
        return list(tokenizer.encode(text, **options))
    except TypeError as error:
        raise ValueError("the prompt is not valid Unicode: was it read in another encoding?") from error


def encode_within(limit: int, tokenizer: PreTrainedTokenizerBase, text: str, **options: Any) -> list[int]:
    """As `encode`, but a text of far more than `limit` tokens is refused without reading it to its end.

    Only the tokens around a cut depend on what comes after it, so twice the limit, and some, is far more.
    """
    enough = 2 * limit + 64
    size = 4 * enough  # characters: about as many as English takes for that
    while size < len(text):
        if len(encode(tokenizer, text[:size], **options)) > enough:
            raise too_long(f"more than {limit}", limit)
        size *= 2
    return encode(tokenizer, text, **options)


def bad_word_tokens(tokenizer: PreTrainedTokenizerBase, words: SequenceOf[str]) -> tuple[tuple[int, ...], ...]:
    """The runs of tokens that write the words, each run once.

    A word is written as at the start of a text, and as after a space, unless that is a space and then the same tokens.
    (vLLM leaves the second way out wherever it has more tokens or fewer, and so lets " curious" pass for "curious".)
    """
    _require_few(len(words), sum(map(len, words)) // MAX_CHARS_OF_TOKEN)  # before any work
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (
            tuple(encode(tokenizer, space + word.lstrip(), add_special_tokens=False)) for space in ("", " ")
        )
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


def too_long(count: str, limit: int) -> ValueError:
    """The error of a prompt that leaves no room for an answer."""
    return ValueError(
        f"the prompt has {count} tokens, and the context of {limit} leaves no room for an answer: "
        "shorten it, or raise max_model_len"
    )


def _is_text(value: object) -> bool:
    """Whether this is a string that has bytes: no lone surrogate in it."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
