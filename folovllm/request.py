"""A request, which never changes, and a sequence: one of its growing answers, the unit that is scheduled and cached."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash

from folovllm.outputs import TokenLogprob
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import SamplingSpec, TokenIds

if TYPE_CHECKING:
    from folovllm.engine.detokenizer import IncrementalDetokenizer

_numbers = itertools.count()


class SequenceStatus(Enum):
    """WAITING -> RUNNING -> one of FINISHED_*, which `is_finished`; preemption leads back from RUNNING to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    def __init__(self, value: str) -> None:
        self.is_finished = value not in ("waiting", "running")


@dataclass(slots=True, frozen=True)
class Request:
    """What a user asks for, checked and tokenized. All answers to one prompt share it."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # of each answer; never beyond the context
    seed: int  # of the first answer; the seeds of the others follow from it
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0  # smaller first, where the scheduler heeds it
    cache_salt: str | None = None  # prefixes are shared only between equal salts
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of tokens that the answer must not hold
    prompt: str | None = None  # the text, if the prompt came as one


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Sequence:
    """Tokens of a prompt and of one answer. There is no prefill mode: `num_computed_tokens` of the `num_tokens` are computed,
    or scheduled to be, and a step computes some of the rest. A step that reaches the last token yields the next one.
    """

    request: Request
    detokenizer: IncrementalDetokenizer
    index: int = 0  # among the `n` answers to one prompt
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)  # M3: blocks in order
    prefix: Any = None  # M5: a `CachedPrefix`, which the prefix cache alone uses
    stop_reason: str | int | None = None
    logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)  # of the answer's tokens, if asked for
    prompt_logprobs: list[dict[int, TokenLogprob]] = field(default_factory=list)  # those that have come
    seq_id: int = field(default_factory=_numbers.__next__)  # unique; an earlier sequence has a smaller one
    request_id: str = field(init=False)  # the request's, as the next three: each is read several times a token
    params: SamplingParams = field(init=False)
    max_tokens: int = field(init=False)
    eos_token_ids: frozenset[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)  # of the prompt and of the answer so far
    num_output_tokens: int = 0  # of the answer so far
    last_token: int = -1  # the newest of the answer
    _token_ids: TokenIds = field(init=False)

    def __post_init__(self) -> None:
        request, prompt = self.request, self.request.prompt_token_ids
        self.request_id, self.params = request.request_id, request.params
        self.max_tokens, self.eos_token_ids = request.max_tokens, request.eos_token_ids
        self.num_prompt_tokens = self.num_tokens = len(prompt)
        self._token_ids = np.empty(self.num_tokens + self.max_tokens, np.int32)
        self._token_ids[: self.num_tokens] = prompt

    @property
    def seed(self) -> int:
        """The seed of this answer's noise."""
        return child_seed(self.request.seed, self.index)

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and answer, `[num_tokens]`: a view that costs nothing."""
        return self._token_ids[: self.num_tokens]

    def tokens(self, start: int, end: int) -> TokenIds:
        """Tokens `start` to `end`, as far as they are known: a view."""
        return self._token_ids[start : min(end, self.num_tokens)]

    @property
    def output_token_ids(self) -> TokenIds:
        """The answer so far."""
        return self._token_ids[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_uncomputed_tokens(self) -> int:
        """What a step may compute (M2): 1 while decoding, else more. At M6 the host may not know that one token yet."""
        missing = self.num_tokens - self.num_computed_tokens
        return missing if missing > 1 else 1

    @property
    def num_unscored_tokens(self) -> int:
        """Tokens of the prompt whose log-probabilities are wanted and have not come: of the first answer, from the second token on."""
        if self.params.prompt_logprobs is None or self.index:
            return 0
        return self.num_prompt_tokens - 1 - len(self.prompt_logprobs)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that the prefix cache had when the sequence was first admitted."""
        return 0 if self.prefix is None else self.prefix.num_hit_tokens or 0

    def append_token(self, token_id: int) -> None:
        """Add a token to the answer."""
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        self.num_output_tokens += 1
        self.last_token = token_id

    def start(self) -> None:
        """WAITING -> RUNNING: M2's scheduler admits the sequence (M1's sets the status itself: this is an exercise of M2). From any other status ValueError (`_expect`), and nothing changes."""
        self._expect(SequenceStatus.WAITING)
        self.status = SequenceStatus.RUNNING

    def requeue(self) -> None:
        """RUNNING -> WAITING: its K/V is gone, its tokens stay; all of them will be computed again.

        From any other status ValueError (`_expect` raises it), and nothing changes.
        """
        self._expect(SequenceStatus.RUNNING)
        self.status = SequenceStatus.WAITING
        self.num_computed_tokens = 0

    def finish(self, status: SequenceStatus) -> None:
        """WAITING or RUNNING -> `status`, one of FINISHED_*; a finished sequence keeps the end that it has, and that is no error.

        ValueError if `status` is no end ("... does not end a sequence"), whatever the sequence's own is.
        """
        if not status.is_finished:
            raise ValueError(f"{status} does not end a sequence")
        if not self.status.is_finished:
            self.status = status

    def _expect(self, status: SequenceStatus) -> None:
        if self.status is not status:
            raise ValueError(f"request {self.request_id} is {self.status.name}, not {status.name}")

    def __repr__(self) -> str:
        name = self.request_id if self.index == 0 else f"{self.request_id}, answer {self.index}"
        return f"Sequence({name}: {self.status.name}, {self.num_computed_tokens} of {self.num_tokens} tokens computed)"


class SequenceOutput(NamedTuple):
    """What a step brought for one sequence: the tokens that joined its answer, and how it ended, if it did."""

    seq: Sequence
    new_token_ids: list[int]
    status: SequenceStatus | None = None  # one of FINISHED_*; None: the answer goes on


def child_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th answer; the first keeps the request's own."""
    return seed if index == 0 else xxhash.xxh64_intdigest(f"{seed}/{index}".encode()) >> 1


def sampling_spec(seq: Sequence) -> SamplingSpec:
    """What a device must know to sample for `seq`. X1: where it has a grammar, that one says which tokens are allowed and may end it."""
    p, is_constrained = seq.params, seq.params.structured_outputs is not None
    return SamplingSpec(
        seed=seq.seed,
        temperature=p.temperature,
        top_k=p.top_k,
        top_p=p.top_p,
        min_p=p.min_p,
        repetition_penalty=p.repetition_penalty,
        presence_penalty=p.presence_penalty,
        frequency_penalty=p.frequency_penalty,
        logprobs=p.logprobs,
        first_end=seq.num_prompt_tokens + p.min_tokens,
        forbidden=tuple(sorted({*seq.eos_token_ids, *p.stop_token_ids})) if p.min_tokens and not is_constrained else (),
        num_prompt_tokens=seq.num_prompt_tokens,
        allowed=None if is_constrained or p.allowed_token_ids is None else tuple(p.allowed_token_ids),
        has_grammar=is_constrained,
        bad_words=seq.request.bad_words,
        bias=tuple((p.logit_bias or {}).items()),
        history=seq.token_ids if p.has_penalties or seq.request.bad_words else seq.token_ids[:0],
    )
