"""The loop around an engine that others feed: take in what arrived, step, hand out what is new, one message a step."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol

from folovllm.cache.prefix_cache import PrefixCacheStats
from folovllm.config import EngineConfig
from folovllm.engine.metrics import EngineStats
from folovllm.inspector.live import LiveLines
from folovllm.inspector.recorder import Engine as WatchedEngine
from folovllm.outputs import CompletionOutput, RequestOutput
from folovllm.sampling_params import SamplingParams
from folovllm.server.messages import (
    Abort,
    Add,
    Command,
    Delta,
    Failure,
    Load,
    News,
    Pace,
    Ready,
    Refused,
    Row,
    Seen,
    Step,
    Stop,
    Watch,
)
from folovllm.setup import EngineSetup


class Engine(WatchedEngine, Protocol):
    """What the loop asks of an engine: `LLMEngine` has it."""

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, priority: int, cache_salt: str | None
    ) -> None:
        """Queue a request. Raises ValueError if it can never be served."""

    def abort_request(self, request_id: Iterable[str]) -> object:
        """End those of the requests that are being served."""

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work."""

    def step(self) -> list[RequestOutput]:
        """Compute, and hand out what is new."""

    def stats(self) -> EngineStats:
        """Requests and cache as they are."""

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Hits so far. Raises ValueError where there is no such cache."""

    def close(self) -> None:
        """Give everything back."""


logger = logging.getLogger("folovllm")
MakeEngine = Callable[[EngineConfig], Engine]


class Link(Protocol):
    """The engine's end of a transport."""

    def receive(self, wait: float | None) -> list[Command]:
        """What has arrived, in order. If nothing has, wait so many seconds for something; None: for ever.

        `Stop` where nobody is left at the other end.
        """

    def send(self, news: News) -> None:
        """Say something."""


def run_engine(config: EngineConfig, link: Link, make_engine: MakeEngine) -> bool:
    """Build an engine and step it until it is told to stop; both in the thread that calls this, which is torch's own.

    Whatever goes wrong is the last that the link hears. Returns whether nothing did.
    """
    engine, loop = None, None
    try:
        engine = make_engine(config)
        loop = EngineLoop(engine, link)
        link.send(Ready(pickle.dumps(plain(engine.setup)), loop.load().kv_blocks_total))
        while loop.turn():
            pass
        loop.watch(False)
        return True
    except Exception as error:
        is_user_error = engine is None and isinstance(error, ValueError)
        if not is_user_error:
            logger.exception("the engine has ended")
        if loop is not None:
            loop.watch(False, f"{type(error).__name__}: {error}")
        link.send(Failure(str(error) if is_user_error else f"{type(error).__name__}: {error}", is_user_error))
        return False
    finally:
        if engine is not None:
            engine.close()


class EngineLoop:
    """Between a link and an engine that is there already."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine = engine
        self._link = link
        self._has_prefix_cache = bool(engine.setup.config.enable_prefix_caching)
        self._live = LiveLines(engine)
        self._delay = 0.0  # seconds between two steps
        self._steps_left: int | None = None  # while it is held; None: it is not

    def turn(self) -> bool:
        """One turn: all that has arrived, then a step, then one message. False: it was told to stop.

        Without work it waits for a command, and takes no time. So does one that is held.
        """
        refused: list[Refused] = []
        is_idle = not self._has_work()
        self._tell(self._live.take(all_of_it=is_idle or self._delay > 0))
        for command in self._link.receive(None if is_idle else self._delay):
            if isinstance(command, Stop):
                return False
            if isinstance(command, Watch):
                self.watch(command.is_on)
            elif isinstance(command, Pace):
                self._delay = command.delay
                self._steps_left = (self._steps_left or 0) + command.step if command.is_held else None
            elif isinstance(command, Abort):
                self._engine.abort_request([str(command.number)])
            elif (refusal := self._add(command)) is not None:
                refused.append(refusal)
        deltas = [delta for output in self._step() for delta in deltas_of(output)]
        self._link.send(Step(deltas, self.load(), refused))
        return True

    def _has_work(self) -> bool:
        """Whether there is something to do, and it may be done."""
        return self._steps_left != 0 and self._engine.has_unfinished_requests()

    def _step(self) -> list[RequestOutput]:
        if self._steps_left is None:
            return self._engine.step()
        if not self._has_work():
            self._engine.events.drain()  # who came is told, though it is held
            return []
        self._steps_left -= 1
        return self._engine.step()

    def watch(self, is_on: bool, how: str = "closed") -> None:
        """Tell what happens from here on, or tell it no more; `how` says why it ends."""
        if is_on:
            self._live.begin()
        else:
            self._tell(self._live.end(how))

    def _tell(self, pieces: list[bytes]) -> None:
        if pieces:
            self._link.send(Seen(pieces))

    def _add(self, add: Add) -> Refused | None:
        try:
            self._engine.add_request(
                str(add.number), add.token_ids, add.params, priority=add.priority, cache_salt=add.cache_salt
            )
        except ValueError as error:
            return Refused(add.number, str(error))
        return None

    def load(self) -> Load:
        """How busy the engine is."""
        stats = self._engine.stats()
        prefix = self._engine.prefix_cache_stats() if self._has_prefix_cache else PrefixCacheStats()
        return Load(
            num_waiting=stats.waiting,
            num_running=stats.running,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_total=stats.kv_blocks_total,
            num_preemptions=stats.preemptions,
            prefix_tokens=prefix.tokens,
            prefix_tokens_hit=prefix.tokens_hit,
        )


def deltas_of(output: RequestOutput) -> Iterable[Delta]:
    """The news of one request, an answer at a time."""
    number, num_cached = int(output.request_id), output.num_cached_tokens
    for answer in output.outputs:
        yield Delta(number, answer.index, answer.delta_token_ids, answer.finish_reason, num_cached, logprobs_of(answer))


def logprobs_of(answer: CompletionOutput) -> list[Row] | None:
    """The new rows of log-probabilities, without their texts: these are made where they are shown."""
    if answer.logprobs is None:
        return None
    return [[(t.token_id, t.logprob, t.rank) for t in row.values()] for row in answer.logprobs]


def plain(setup: EngineSetup) -> EngineSetup:
    """The set-up as it can be sent: a class of the model's own may not exist in another process."""
    return replace(setup, hf_config=SimpleNamespace(**setup.hf_config.to_dict()))
