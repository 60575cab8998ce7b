"""An engine whose steps are written down, and a transport whose turns are taken by hand: no threads, no clocks."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from folovllm.config import EngineConfig
from folovllm.electives.server.engine_loop import EngineLoop, plain
from folovllm.electives.server.messages import Abort, Add, Command, EngineMessage, Ready
from folovllm.electives.server.transport import Deliver
from folovllm.engine import events as ev
from folovllm.engine.setup import set_up
from folovllm.request import Request
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import NO_TOKENS, ScheduledSequence, SchedulerOutput, StepResult
from tests.helpers import tiny_checkpoint

A = 64  # the id of "a" in the tests' tokenizer


def request_of(number: int, ids: list[int], params: SamplingParams, **fields: Any) -> Request:
    """A request as the server hands it to the engine."""
    return Request(str(number), ids, params, params.max_tokens or 9, 0, **fields)


class ScriptedEngine:
    """Gives request i the tokens i, i + 1, ... of "abc...", a token a step, until its `max_tokens`; it says so by events."""

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.setup = set_up(config or EngineConfig(model=str(tiny_checkpoint())))
        self.requests: dict[str, dict[str, Any]] = {}
        self.aborted: list[str] = []
        self.refuses: str | None = None
        self.num_steps = 0
        self.is_closed, self.refusal = False, ""
        self._num_seqs = 0

    def subscribe(self, listener: ev.Listener) -> None:
        self._tell = listener
        listener([ev.Snapshot(100, 16, 256, 8192, 0, (), ())])

    def add_checked(self, request: Request) -> None:
        request_id, params = request.request_id, request.params
        if self.refuses:
            raise ValueError(self.refuses)
        ids = [self._num_seqs + i for i in range(params.n)]
        self._num_seqs += params.n
        self.requests[request_id] = {"seq_ids": ids, "params": params, "num_given": 0, "request": request}
        for index, seq_id in enumerate(ids):
            self._tell(
                [ev.RequestAdded(seq_id, request_id, index, request.prompt_token_ids, params.max_tokens or 0, 0, 0.0)]
            )
            self._tell([ev.Admitted(seq_id, 0)])

    def give_up(self, request_id: str) -> None:
        request = self.requests.pop(request_id)
        self._tell([event(seq_id) for seq_id in request["seq_ids"] for event in (ev.GivenUp, ev.Aborted)])

    def abort_request(self, request_id: Iterable[str]) -> None:
        for id_ in request_id:
            if request := self.requests.pop(id_, None):
                self._tell([ev.Aborted(seq_id) for seq_id in request["seq_ids"]])
                self.aborted.append(id_)

    def prepare_structured_outputs(self) -> None:
        pass

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> None:
        self.num_steps += bool(self.requests)
        scheduled_seqs, drawn, ends = list[ScheduledSequence](), list[list[int]](), list[ev.Event]()
        for id_, request in list(self.requests.items()):
            for index, seq_id in enumerate(request["seq_ids"]):
                scheduled_seqs.append(ScheduledSequence(seq_id, 0, 0, 1, NO_TOKENS, (), 0, 1, None))
                drawn.append([A + (int(id_) + index + request["num_given"]) % 26])
            request["num_given"] += 1
            if request["num_given"] == request["params"].max_tokens:
                ends += [ev.Finished(seq_id, "length") for seq_id in request["seq_ids"]]
                del self.requests[id_]
        if scheduled_seqs:
            output, result = SchedulerOutput(tuple(scheduled_seqs)), StepResult(drawn, {})
            self._tell([ev.StepEnded(self.num_steps, 0.0, 0.0, 0.0, output, result, 0, 0), *ends])

    def close(self) -> None:
        self.is_closed = True


class HandTransport:
    """Both ends of a transport: what is said waits until a test takes a turn."""

    def __init__(self, engine: ScriptedEngine | None = None) -> None:
        self.engine = engine or ScriptedEngine()
        self.inbox: list[Command] = []
        self.sent: list[EngineMessage] = []
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

    def send(self, message: EngineMessage) -> None:
        self._transport.sent.append(message)
        self._transport.deliver(message)
