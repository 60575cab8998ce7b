"""Turns what a user passes into a `Request` and its sequences, or into an error before any work starts."""

from __future__ import annotations

import random
from functools import cached_property
from typing import TYPE_CHECKING

from folovllm.engine.bad_words import forbidden_runs
from folovllm.engine.detokenizer import IncrementalDetokenizer, make_detokenizer
from folovllm.engine.detokenizer_stream import make_stream_detokenizer
from folovllm.engine.inputs import Prompt, encode, parse_prompt
from folovllm.engine.no_text import NoText
from folovllm.engine.prompt_forms import PromptParts
from folovllm.engine.require import is_whole, require, require_text
from folovllm.engine.setup import EngineSetup
from folovllm.engine.spelling import Spelling
from folovllm.models.files import eos_token_ids
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class InputProcessor:
    """Tokenizes, validates, and splits a request of `n` answers into `n` sequences. A request that fits into `max_model_len` fits into the KV cache, too."""

    def __init__(self, setup: EngineSetup, tokenizer: PreTrainedTokenizerBase) -> None:
        self._setup = setup
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids(setup.path, setup.hf_config, tokenizer)  # the model's own end-of-text ids
        self._seeds = random.Random(setup.config.seed)  # for requests that bring none

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self._tokenizer)

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0, cache_salt: str | None = None
    ) -> list[Sequence]:
        """Returns the sequences of a request, one for each answer. Raises ValueError for a prompt or parameters that cannot be served."""
        require(isinstance(params, SamplingParams), f"sampling parameters are a SamplingParams, not {params!r}")
        fits = is_whole(priority) and -(2**63) <= priority < 2**63
        require(fits, f"priority must be a whole number from -2**63 to 2**63 - 1, not {priority!r}")
        params, parts = params.clone(), parse_prompt(prompt)  # the caller's own may change while the request runs
        if (cache_salt := parts.cache_salt if cache_salt is None else cache_salt) is not None:
            require_text("cache_salt", cache_salt)
        self.check_amounts(params)
        token_ids = self._tokenize(parts, params)
        self._validate(token_ids, params)
        # `forbidden_runs` also checks that bad words leave some of the allowed tokens.
        has_runs = params.bad_words or params.allowed_token_ids is not None
        room = self._setup.max_model_len - len(token_ids) + params.prompt_only  # a scored prompt's token is dropped
        request = Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            bad_words=forbidden_runs(self._tokenizer, params, self.eos_token_ids) if has_runs else (),
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
            eos_token_ids=self.eos_token_ids,
            priority=priority,
            cache_salt=cache_salt,
            prompt=parts.text,
        )
        return self.sequences(request)

    def sequences(self, request: Request) -> list[Sequence]:
        """Returns the sequences of a request that was checked before, by this processor or in another process."""
        return [Sequence(request, self._make_detokenizer(request.params), i) for i in range(request.params.n)]

    def _make_detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer:
        if not params.detokenize:
            return NoText()
        make = make_stream_detokenizer if self._setup.config.packed_steps else make_detokenizer  # M6: a faster one
        detokenizer = make(self._tokenizer, params)
        if (params.logprobs, params.prompt_logprobs) != (None, None):
            detokenizer.spelling = self._spelling
        return detokenizer

    def _tokenize(self, parts: PromptParts, params: SamplingParams) -> list[int]:
        limit, text, keep = self._setup.max_model_len, parts.text or "", params.truncate_prompt_tokens
        if keep is None and parts.token_ids is not None:
            return parts.token_ids
        if keep is None and len(text) <= limit:  # short enough to encode whole; `_validate` counts tokens
            return encode(self._tokenizer, text)
        from folovllm.engine.long_prompts import encode_whole, encode_within

        if keep is None:
            return encode_within(limit, self._tokenizer, text)
        return encode_whole(self._tokenizer, parts)[-(limit - 1 if keep == -1 else keep) :]

    def check_amounts(self, params: SamplingParams) -> None:
        """Raise ValueError if a request asks for more of something than the engine gives."""
        for name in ("n", "logprobs", "prompt_logprobs"):
            field = f"max_{name.removeprefix('prompt_')}"
            value, limit = getattr(params, name) or 0, getattr(self._setup.config, field)
            says = f"{name} is {value}, and this engine gives {limit} at most: ask for less, or raise {field}"
            require(value <= limit, says)

    def _validate(self, token_ids: list[int], params: SamplingParams) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty: give at least one token")
        limit, vocab_size = self._setup.max_model_len, self._setup.vocab_size
        if len(token_ids) >= limit + params.prompt_only:
            from folovllm.engine.long_prompts import too_long

            raise too_long(str(len(token_ids)), limit)
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            bad = next(t for t in token_ids if not 0 <= t < vocab_size)
            raise ValueError(f"token id {bad} is outside the vocabulary: ids go from 0 to {vocab_size - 1}")
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                says = f"{name} must lie between 0 and {vocab_size - 1}, and {token_id} does not"
                require(0 <= token_id < vocab_size, says)
