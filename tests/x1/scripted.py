"""An engine whose steps are written down, and a transport whose turns are taken by hand: no threads, no clocks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from folovllm.cache.prefix_cache import PrefixCacheStats
from folovllm.config import EngineConfig
from folovllm.engine.metrics import EngineStats
from folovllm.engine.setup import set_up
from folovllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from folovllm.sampling_params import SamplingParams
from folovllm.server.engine_loop import EngineLoop, plain
from folovllm.server.messages import Abort, Add, Command, News, Ready
from folovllm.server.transport import Deliver
from tests.helpers import tiny_checkpoint

A = 64  # the id of "a" in the tests' tokenizer


class ScriptedEngine:
    """Gives request i the tokens i, i + 1, ... of "abc...", a token a step, until its `max_tokens`."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.setup = set_up(config or EngineConfig(model=str(tiny_checkpoint())))
        self.requests: dict[str, dict[str, Any]] = {}
        self.aborted: list[str] = []
        self.refuses: str | None = None
        self.num_steps = 0
        self.is_closed = False

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, **extra: Any) -> None:
        if self.refuses:
            raise ValueError(self.refuses)
        self.requests[request_id] = {"prompt": prompt, "params": params, "given": [0] * params.n, **extra}

    def abort_request(self, request_id: Iterable[str]) -> None:
        for id_ in request_id:
            if self.requests.pop(id_, None):
                self.aborted.append(id_)

    def prepare_forms(self) -> None:
        pass

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[RequestOutput]:
        self.num_steps += bool(self.requests)
        outputs = [self._advance(id_, request) for id_, request in self.requests.items()]
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        return outputs

    def _advance(self, id_: str, request: dict[str, Any]) -> RequestOutput:
        answers = []
        for index, given in enumerate(request["given"]):
            token = A + (int(id_) + index + given) % 26
            request["given"][index] = given + 1
            over = "length" if given + 1 >= request["params"].max_tokens else None
            answers.append(
                CompletionOutput(index, text="", token_ids=[token], finish_reason=over, delta_token_ids=[token])
            )
        finished = answers[0].finish_reason is not None
        return RequestOutput(id_, None, request["prompt"], answers, finished, RequestMetrics(0.0))

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self.requests), self.num_steps, 0, 100, 10 * len(self.requests), 0, 0, 0, 0)

    def prefix_cache_stats(self) -> PrefixCacheStats:
        return PrefixCacheStats()

    def close(self) -> None:
        self.is_closed = True


class HandTransport:
    """Both ends of a transport: what is said waits until a test takes a turn."""

    def __init__(self, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine()
        self.inbox: list[Command] = []
        self.sent: list[News] = []
        self.is_stopped = False

    async def start(self, config: EngineConfig, deliver: Deliver) -> None:
        self.deliver = deliver
        self._loop = EngineLoop(self.engine, _Link(self))
        deliver(Ready(pickle.dumps(plain(self.engine.setup)), 100))

    def send(self, command: Command) -> None:
        self.inbox.append(command)

    async def stop(self) -> None:
        self.is_stopped = True

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._loop.turn()

    @property
    def added(self) -> list[Add]:
        return [command for command in self.inbox if isinstance(command, Add)]

    @property
    def ended(self) -> list[int]:
        return [command.number for command in self.inbox if isinstance(command, Abort)]


class _Link:
    def __init__(self, transport: HandTransport) -> None:
        self._transport = transport

    def receive(self, wait: bool) -> list[Command]:
        commands, self._transport.inbox = self._transport.inbox, []
        return commands

    def send(self, news: News) -> None:
        self._transport.sent.append(news)
        self._transport.deliver(news)
