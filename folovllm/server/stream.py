"""The server's side of one request: it hears which tokens were drawn, and makes text of them when somebody looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from folovllm.cache.prefix_cache import CachedPrefix
from folovllm.engine.output_processor import RequestState
from folovllm.engine.stop import check_stop_conditions
from folovllm.outputs import RequestOutput, TokenLogprob
from folovllm.request import Sequence, SequenceStatus
from folovllm.sampling_params import RequestOutputKind, SamplingParams
from folovllm.server.messages import Add, Delta, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prepared:
    """A request that was found good: tokenized, and within what the engine allows. Nothing was sent yet."""

    def __init__(
        self, params: SamplingParams, text: str | None, seqs: list[Sequence], priority: int, cache_salt: str | None
    ) -> None:
        self.params, self.text, self.seqs = params, text, seqs
        self.priority, self.cache_salt = priority, cache_salt

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.seqs[0].num_prompt_tokens

    def message(self, number: int) -> Add:
        """What the engine is told. It makes no text but where it must look for stop strings."""
        params = replace(
            self.params,
            detokenize=bool(self.params.stop),
            truncate_prompt_tokens=None,
            output_kind=RequestOutputKind.DELTA,
        )
        return Add(number, self.seqs[0].prompt_token_ids, params, int(self.priority), self.cache_salt)


class Stream:
    """The outputs of one request, for one reader.

    The sequences here mirror the engine's: they get the same tokens, so the same text, cut at the same stop string. There
    is no queue of outputs. A reader gets all that is new since it last looked, so one that reads slowly gets fewer and
    longer pieces, and holds no more memory than the answer takes.
    """

    def __init__(
        self,
        number: int,
        request_id: str,
        request: Prepared,
        arrival: float,
        tokenizer: PreTrainedTokenizerBase,
        on_close: Callable[[Stream], None],
    ) -> None:
        self.number, self.request_id = number, request_id
        self.params = request.params
        self.state = RequestState(request_id, request.text, request.seqs, request.params.output_kind, arrival)
        self.newest: list[float | None] = [None] * len(request.seqs)  # when each answer got its newest tokens
        self._seqs = request.seqs
        self._decode = tokenizer.decode if request.params.detokenize else None
        self._on_close = on_close
        self.is_finished = False
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._is_over = False

    @property
    def has_begun(self) -> bool:
        """Whether a token has come."""
        return self.state.metrics.first_token_time is not None

    def feed(self, delta: Delta, now: float) -> None:
        """Take in what a step drew."""
        seq = self._seqs[delta.index]
        if not self.has_begun:
            self._seqs[0].prefix = CachedPrefix(num_hit_tokens=delta.num_cached_tokens)
        for row in delta.prompt_logprobs or ():
            self._seqs[0].prompt_logprobs.append(self._with_text(row))
        for row in delta.logprobs or ():
            seq.logprobs.append(self._with_text(row))
        for token_id in delta.token_ids:
            seq.append_token(token_id)
            seq.detokenizer.append(token_id)
            check_stop_conditions(seq)  # cuts the text, and notes what stopped it
        if delta.finish_reason is not None:
            seq.finish(SequenceStatus(delta.finish_reason))
            self.is_finished = self.state.finished
        self.newest[delta.index] = now
        self.state.note_progress(now)
        if self.is_finished or self.state.streams:
            self._news.set()

    def _with_text(self, row: Row) -> dict[int, TokenLogprob]:
        decode = self._decode or (lambda _: None)
        return {id_: TokenLogprob(id_, value, rank, decode([id_])) for id_, value, rank in row}

    def abort(self, now: float) -> None:
        """End it here; its reader gets what there is, with finish_reason "abort"."""
        for seq in self._seqs:
            seq.finish(SequenceStatus.FINISHED_ABORTED)
        self.state.note_progress(now)
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self._error = error
        self._news.set()

    def close(self) -> None:
        """The reader goes. If the answer is not over, the engine stops working on it."""
        self._is_over = True
        self._on_close(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            self._is_over = True
            raise self._error
        output = self.state.output()
        self._is_over = output.finished
        return output
