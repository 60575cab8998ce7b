"""The loop around the step: what it takes in, when it waits, what it says last. Engine and link are scripted: no threads."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from folovllm.config import EngineConfig
from folovllm.electives.server.engine_loop import EngineLoop, run_engine
from folovllm.electives.server.messages import Abort, Add, Command, EngineMessage, Failure, Ready, Step, Stop
from folovllm.request import Request
from folovllm.sampling_params import SamplingParams
from tests.helpers import tiny_checkpoint
from tests.tiny import worked_case
from tests.x1.scripted import A, ScriptedEngine, request_of


class LoggingEngine(ScriptedEngine):
    """Writes down what it is asked to do."""

    def __init__(self, log: list[str] | None = None) -> None:
        super().__init__(EngineConfig(model=str(tiny_checkpoint())))
        self.log = [] if log is None else log
        self.fails: Exception | None = None

    def add_checked(self, request: Request) -> None:
        self.log.append(f"add {request.request_id}")
        super().add_checked(request)

    def abort_request(self, request_id: Iterable[str]) -> None:
        ids = list(request_id)
        self.log.append(f"abort {', '.join(ids)}")
        super().abort_request(ids)

    def step(self) -> None:
        self.log.append("step")
        if self.fails is not None:
            raise self.fails
        super().step()


class ScriptedLink:
    """Hands out a list of commands at each look, and writes down what is said."""

    def __init__(self, *script: list[Command], log: list[str] | None = None) -> None:
        self.script, self.log, self.sent = list(script), [] if log is None else log, list[EngineMessage]()

    def receive(self, wait: bool) -> list[Command]:
        self.log.append("wait for commands" if wait else "look for commands")
        if self.script:
            return self.script.pop(0)
        assert not wait, "the script is over, and a loop that waits now waits for ever"
        return []

    def send(self, message: EngineMessage) -> None:
        self.sent.append(message)
        if isinstance(message, Step):
            self.log.append(f"say {[delta.number for delta in message.deltas]}")


def add(number: int, max_tokens: int = 9) -> Add:
    return Add(number, request_of(number, [1, 2, 3], SamplingParams(max_tokens=max_tokens)))


def loop_of(*script: list[Command]) -> tuple[EngineLoop, LoggingEngine, ScriptedLink]:
    """A loop whose engine and link write into one log."""
    engine = LoggingEngine()
    link = ScriptedLink(*script, log=engine.log)
    return EngineLoop(engine, link), engine, link


def turn(loop: EngineLoop) -> bool:
    """One turn; what the engine says about single requests must not leave it as an exception."""
    try:
        return loop.turn()
    except ValueError as error:
        said = f"`turn` let an exception of the engine out: {type(error).__name__}: {error}"
        pytest.fail(f"{said}. It is about single requests: tell their senders, and go on", pytrace=False)


class TestTurn:
    def test_a_worked_case(self) -> None:
        """Two requests come to an idle engine; then one goes and a third one comes; then the engine is told to stop."""
        loop, engine, _ = loop_of([add(10), add(1)], [Abort(10), add(2)], [Stop(), add(3)])
        got = {}
        for name in ("an idle engine", "an engine that works", "the end"):
            result = turn(loop)
            got[name] = [*engine.log, f"return {result}"]
            engine.log.clear()
        says = "idle it waits, busy it looks; all that has arrived, then one step, then one message; after Stop nothing more"
        expected = [
            ["wait for commands", "add 10", "add 1", "step", "say [10, 1]", "return True"],
            ["look for commands", "abort 10", "add 2", "step", "say [1, 2]", "return True"],
            ["look for commands", "return False"],
        ]
        worked_case("x1.1", got, dict(zip(got, expected, strict=True)), says)

    def test_it_works_on_without_commands(self) -> None:
        loop, engine, link = loop_of([add(0, max_tokens=3)], [], [])
        for _ in range(3):
            assert turn(loop), "nobody has said stop"
        tokens = [delta.token_ids for message in link.sent if isinstance(message, Step) for delta in message.deltas]
        assert [ids for ids in tokens if ids] == [[A], [A + 1], [A + 2]], "a step a turn, and what it drew goes out"
        assert engine.log.count("wait for commands") == 1, "only the first turn found the engine without work"

    def test_it_waits_again_when_all_is_answered(self) -> None:
        loop, engine, _ = loop_of([add(0, max_tokens=1)], [add(1, max_tokens=1)])
        turn(loop)
        turn(loop)
        assert engine.log.count("wait for commands") == 2, "request 0 was over, so the engine had no work: it waits"

    def test_what_is_refused_is_said_and_nobody_else_hears_of_it(self) -> None:
        loop, engine, link = loop_of([add(0)], [add(1)], [])
        turn(loop)
        engine.refuses = "the prompt is too long"
        assert turn(loop), "a request that cannot be served ends nothing"
        step = link.sent[-1]
        assert isinstance(step, Step), "a turn says one Step"
        refused = [(each.number, each.message) for each in step.refused]
        assert refused == [(1, "the prompt is too long")], "its sender is told, with the engine's sentence"
        assert [delta.number for delta in step.deltas] == [0], "request 0 gets its token in the same step"

    def test_each_refusal_is_said_and_said_once(self) -> None:
        loop, engine, link = loop_of([add(0), add(1), Abort(9)], [add(2)])
        engine.refuses = "no"
        turn(loop)
        assert "abort 9" in engine.log, "a refusal ends nothing: what arrived after it is taken in, too"
        engine.refuses = None
        turn(loop)
        refused = [[each.number for each in message.refused] for message in link.sent if isinstance(message, Step)]
        assert refused == [[0, 1], []], "both are refused in the first turn's message, and nobody in the second's"

    def test_commands_are_taken_in_their_order(self) -> None:
        """A client asks and leaves before the loop looks: the request must not be served to its end for nobody."""
        loop, engine, _ = loop_of([add(0), Abort(0)])
        assert turn(loop), "nobody has said stop"
        assert engine.log[1:3] == ["add 0", "abort 0"], "what was sent first is done first"
        assert not engine.has_unfinished_requests(), "request 0 has gone again"

    def test_stop_among_others(self) -> None:
        loop, engine, link = loop_of([add(0)], [Abort(0), Stop(), add(1)])
        turn(loop)
        engine.log.clear()
        assert not turn(loop), "Stop has arrived, behind another command"
        assert "step" not in engine.log and len(link.sent) == 1, "it ends the turn: no step, and no message, for nobody"

    def test_all_have_gone_and_the_load_is_told(self) -> None:
        loop, _, link = loop_of([add(0)], [Abort(0)])
        turn(loop)
        turn(loop)
        assert len(link.sent) == 2, "a message each turn: else the server goes on showing a request that runs"

    def test_a_step_that_served_nobody_has_its_message(self) -> None:
        """Else the refusal stayed here, and its sender would wait for ever."""
        loop, engine, link = loop_of([add(0)])
        engine.refuses = "no"
        turn(loop)
        assert len(link.sent) == 1, "one message a turn, also without a single token in it"

    def test_the_request_is_handed_on_whole(self) -> None:
        params = SamplingParams(max_tokens=5)
        request = request_of(7, [1, 2], params, priority=-3, cache_salt="salt")
        loop, engine, _ = loop_of([Add(7, request)])
        turn(loop)
        assert engine.requests["7"]["request"] == request, "parameters, priority and salt arrive at the engine"


def run(link: ScriptedLink, engine: LoggingEngine, change: Callable[[], None] = lambda: None) -> bool:
    def make(config: EngineConfig) -> LoggingEngine:
        change()
        return engine

    try:
        return run_engine(engine.setup.config, link, make)
    except BrokenPipeError:  # of the link itself, which can be told nothing
        raise
    except Exception as error:
        said = f"`run_engine` let an exception out: {type(error).__name__}: {error}"
        pytest.fail(f"{said}. The last that the link hears of it is a `Failure`", pytrace=False)


class TestRunEngine:
    def test_from_ready_to_stop(self) -> None:
        engine = LoggingEngine()
        link = ScriptedLink([add(0)], [], [Stop()])
        assert run(link, engine) is True, "it ended as it was told to"
        assert link.sent, "the server hears nothing at all, not even that the engine is there (`Ready`)"
        ready, *steps = link.sent
        assert isinstance(ready, Ready), "the first thing that it says: the engine is there"
        assert ready.num_kv_blocks == 100, "with the number of its KV blocks"
        setup = pickle.loads(ready.setup)
        assert setup.path == engine.setup.path, "and its set-up, pickled"
        assert type(setup.hf_config) is SimpleNamespace, "`plain`: a class of the model's own may not exist elsewhere"
        assert [type(message) for message in steps] == [Step, Step], "a message a turn until Stop, and nothing after it"
        assert engine.is_closed, "whoever builds an engine closes it"

    def test_ready_is_said_by_a_loop_that_listens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One loop reads the engine's events, and it is there before Ready. If it cannot be made, nobody hears Ready."""
        engine, heard = LoggingEngine(), list[int]()
        subscribe = engine.subscribe

        def counted(subscriber: Any) -> None:
            heard.append(len(link.sent))
            subscribe(subscriber)

        monkeypatch.setattr(engine, "subscribe", counted)
        link = ScriptedLink([Stop()])
        run(link, engine)
        assert heard == [0], (
            f"messages that had been sent when a loop subscribed: {heard}; one loop does, before all messages"
        )

        def fail(subscriber: Any) -> None:
            raise RuntimeError("no room")

        monkeypatch.setattr(engine, "subscribe", fail)
        link = ScriptedLink()
        assert not run(link, engine), "the loop could not be made"
        assert [type(said) for said in link.sent] == [Failure], "Ready is said of an engine whose loop is there"

    def test_an_exception_in_a_step_is_the_last_word(self) -> None:
        engine = LoggingEngine()
        link = ScriptedLink([add(0)], [], [Stop()])
        engine.fails = RuntimeError("the device is on fire")
        assert run(link, engine) is False, "it did not end as it was told to"
        assert link.sent[-1] == Failure("RuntimeError: the device is on fire"), "else all streams wait for ever"
        assert engine.log == ["add 0", "step"], "an engine in an unknown state makes no further step"
        assert engine.is_closed, "it is closed all the same"

    @pytest.mark.parametrize(
        "error", [KeyError(7), ZeroDivisionError("by zero"), MemoryError("no room"), ValueError("shapes")]
    )
    def test_any_exception_is_told_and_noted(self, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
        """Once the engine was built none is the user's fault, a ValueError neither."""
        engine, link = LoggingEngine(), ScriptedLink([add(0)])
        engine.fails = error
        assert run(link, engine) is False, "it did not end well"
        assert link.sent[-1] == Failure(f"{type(error).__name__}: {error}"), (
            "of whatever type: its name and its sentence, which help whoever looks for it"
        )
        assert [record.exc_info and record.exc_info[1] for record in caplog.records] == [error], (
            "`logger.exception` notes it, with where it came from"
        )

    def test_an_engine_that_nobody_hears_is_closed(self) -> None:
        """The server is gone: the link raises, also for the last word."""

        class Broken(ScriptedLink):
            def send(self, message: EngineMessage) -> None:
                raise BrokenPipeError("nobody reads")

        engine = LoggingEngine()
        with pytest.raises(BrokenPipeError):
            run(Broken([add(0)]), engine)
        assert engine.is_closed, "its ranks and their memory must not stay, whatever happens"

    def test_once_the_engine_is_built_no_error_is_the_users(self) -> None:
        """Though nothing was said to be ready yet."""

        class NotReady(ScriptedLink):
            def send(self, message: EngineMessage) -> None:
                if isinstance(message, Ready):
                    raise ValueError("cannot be sent")
                super().send(message)

        link = NotReady()
        assert run(link, LoggingEngine()) is False, "it did not end well"
        assert link.sent == [Failure("ValueError: cannot be sent", False)], "the engine is there: the fault is ours"

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (ValueError("no such model: look at the name"), Failure("no such model: look at the name", True)),
            (OSError("the disk is gone"), Failure("OSError: the disk is gone", False)),
        ],
    )
    def test_an_engine_that_cannot_be_built(
        self, error: Exception, said: Failure, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail() -> None:
            raise error

        engine, link = LoggingEngine(), ScriptedLink()
        assert run(link, engine, fail) is False, "there is no engine"
        assert link.sent == [said], "one word, the last; a ValueError's sentence is for the user as it is"
        assert len(caplog.records) == (not said.is_user_error), (
            "a traceback in the log helps with a fault of ours alone"
        )
        assert not engine.is_closed, "what was never built is not closed"
