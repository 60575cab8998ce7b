"""Many coroutines, one engine: who gets which tokens, who is told when something ends, and that nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from folovllm.config import EngineConfig
from folovllm.electives.server.async_engine import AsyncEngine
from folovllm.electives.server.errors import EngineDead, Unavailable
from folovllm.electives.server.messages import Delta, Failure, SchedulerStats, Step
from folovllm.electives.server.stream import Stream
from folovllm.electives.server.transport import ThreadEngineClient
from folovllm.llm import LLM
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import RequestOutputKind, SamplingParams
from tests.helpers import tiny_checkpoint
from tests.x1.scripted import A, HandTransport, ScriptedEngine

DELTAS = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
PROMPT = [1, 2, 3]


Test = Callable[[Any, AsyncEngine, HandTransport], Awaitable[None]]


def scripted(test: Test) -> Callable[[Any], None]:
    """A test with an engine whose turns it takes itself."""

    async def run(self: object) -> None:
        transport = HandTransport()
        async with AsyncEngine(str(tiny_checkpoint()), transport=transport) as engine:
            await test(self, engine, transport)
        assert transport.is_stopped

    def call(self: object) -> None:
        asyncio.run(asyncio.wait_for(run(self), 30))

    call.__name__, call.__doc__ = test.__name__, test.__doc__
    return call


async def submit(engine: AsyncEngine, params: SamplingParams = DELTAS, request_id: str | None = None) -> Stream:
    return engine.submit(await engine.prepare(PROMPT, params), request_id)


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


class TestStreams:
    @scripted
    async def test_a_worked_case(self, engine: AsyncEngine, transport: HandTransport) -> None:
        """Request 0 gets a, b, c, d. Request 1 comes a step later and gets b, c, d, e."""
        first = await submit(engine)
        transport.turn()
        second = await submit(engine)
        transport.turn()
        assert (text(await anext(first)), text(await anext(second))) == ("ab", "b")
        transport.turn(2)
        last = await anext(first)
        assert (text(last), last.outputs[0].finish_reason, last.finished) == ("cd", "length", True)
        assert [output async for output in first] == []
        transport.turn()
        assert text(await anext(second)) == "cde"

    @scripted
    async def test_an_output_that_grows(self, engine: AsyncEngine, transport: HandTransport) -> None:
        growing = await submit(engine, replace(DELTAS, output_kind=RequestOutputKind.CUMULATIVE))
        transport.turn(2)
        assert text(await anext(growing)) == "ab"
        transport.turn(2)
        answer = (await anext(growing)).outputs[0]
        assert (answer.text, answer.delta_text, answer.token_ids) == ("abcd", "cd", [A, A + 1, A + 2, A + 3])

    @scripted
    async def test_what_the_engine_is_told(self, engine: AsyncEngine, transport: HandTransport) -> None:
        """Token ids; text is made by the engine only where it must look for stop strings."""
        params = SamplingParams(max_tokens=3, truncate_prompt_tokens=2)
        plain = await engine.prepare("abc", params, priority=-2, cache_salt="s")
        engine.submit(plain)
        engine.submit(await engine.prepare("abc", replace(params, stop=["x"])))
        first, second = (added.request for added in transport.added)
        assert (first.prompt_token_ids, first.priority, first.cache_salt) == ([A + 1, A + 2], -2, "s")
        assert (first.params.detokenize, second.params.detokenize) == (False, True)
        assert (first.request_id, first.max_tokens, first.prompt) == ("0", 3, None)


class TestEnds:
    @scripted
    async def test_closing_the_generator_ends_the_request(self, engine: AsyncEngine, transport: HandTransport) -> None:
        outputs = engine.generate(PROMPT, DELTAS)
        reading = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        transport.turn()
        assert text(await reading) == "a"
        await outputs.aclose()
        assert transport.ended == [0] and engine.num_open == 0
        transport.turn()
        assert transport.engine.aborted == ["0"] and engine.counters.finished["abort"] == 1

    @scripted
    async def test_cancelling_the_reader_ends_the_request(self, engine: AsyncEngine, transport: HandTransport) -> None:
        async def read() -> None:
            async for _ in engine.generate(PROMPT, DELTAS):
                raise AssertionError("no step was taken")

        reader = asyncio.ensure_future(read())
        while not transport.added:
            await asyncio.sleep(0)
        assert (engine.num_queued, engine.num_queued_tokens) == (1, 3)
        reader.cancel()
        await asyncio.wait([reader])
        assert transport.ended == [0]
        assert (engine.num_open, engine.num_queued, engine.num_queued_tokens) == (0, 0, 0)

    @scripted
    async def test_the_engine_gives_up(self, engine: AsyncEngine, transport: HandTransport) -> None:
        """As it does with an answer that cannot get its form any more: the reader hears of the end."""
        begun, queued = await submit(engine), await submit(engine)
        transport.turn()
        assert text(await anext(begun)) == "a"
        for number in "01":
            transport.engine.give_up(number)
        transport.turn()
        reasons = [[answer.finish_reason for answer in (await anext(stream)).outputs] for stream in (begun, queued)]
        assert reasons == [["abort"], ["abort"]] and not transport.ended
        assert (engine.num_open, engine.num_queued) == (0, 0) and engine.counters.finished["abort"] == 2

    @scripted
    async def test_a_request_leaves_the_queue_once(self, engine: AsyncEngine, transport: HandTransport) -> None:
        """A long prompt that is scored, chunk by chunk, tells of itself before its first token."""
        await submit(engine, replace(DELTAS, prompt_logprobs=0))
        await submit(engine)
        for token_id in (1, 2):
            transport.deliver(Step([Delta(0, 0, [], prompt_logprobs=[[(token_id, -1.0, 1)]])], SchedulerStats()))
        assert (engine.num_queued, engine.num_queued_tokens) == (2, 6), "no token has come yet"
        transport.deliver(Step([Delta(0, 0, [A])], SchedulerStats()))
        assert (engine.num_queued, engine.num_queued_tokens) == (1, 3)
        assert engine.counters.prompt_tokens == 3, "one prompt has been answered"

    @scripted
    async def test_abort(self, engine: AsyncEngine, transport: HandTransport) -> None:
        """The reader gets what there is. The engine's news of the request, which was under way, is nobody's."""
        stream = await submit(engine, request_id="mine")
        transport.turn()
        engine.abort("mine")
        engine.abort("mine")
        engine.abort("never was")
        again = await submit(engine, request_id="mine")
        transport.deliver(Step([Delta(0, 0, [A + 25])], SchedulerStats()))
        output = await anext(stream)
        assert (text(output), output.outputs[0].finish_reason) == ("a", "abort")
        assert transport.ended == [0]
        stream.close()  # of the old one: the new one of the same name lives
        assert engine.num_open == 1 and not again.has_begun

    @scripted
    async def test_an_id_is_used_once_at_a_time(self, engine: AsyncEngine, transport: HandTransport) -> None:
        await submit(engine, request_id="mine")
        with pytest.raises(ValueError, match="'mine' is in use"):
            await submit(engine, request_id="mine")
        transport.turn(4)
        await submit(engine, request_id="mine")

    @scripted
    async def test_what_the_engine_refuses(self, engine: AsyncEngine, transport: HandTransport) -> None:
        other = await submit(engine)
        transport.turn()
        transport.engine.refuses = "not today"
        stream = await submit(engine)
        transport.turn()
        with pytest.raises(ValueError, match="not today"):
            await anext(stream)
        assert text(await anext(other)) == "ab" and engine.num_queued == 0

    @scripted
    async def test_a_drain_waits_for_all(self, engine: AsyncEngine, transport: HandTransport) -> None:
        """Nothing new; what runs ends."""
        stream = await submit(engine)
        transport.turn(2)
        await submit(engine)
        draining = asyncio.ensure_future(engine.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="takes no new requests"):
            await engine.prepare(PROMPT)
        transport.turn(2)
        await asyncio.sleep(0)
        assert engine.num_open == 1 and not draining.done(), "one of two has ended"
        transport.turn(2)
        assert await draining
        assert text(await anext(stream)) == "abcd"

    @scripted
    async def test_a_drain_that_takes_too_long(self, engine: AsyncEngine, transport: HandTransport) -> None:
        stream = await submit(engine)
        assert not await engine.drain(seconds=0)
        assert (await anext(stream)).outputs[0].finish_reason == "abort"

    @scripted
    async def test_death(self, engine: AsyncEngine, transport: HandTransport) -> None:
        """Every reader is told, whether it waits or not; so is everybody who comes later, and nobody waits for ever."""
        waiting, idle = await submit(engine), await submit(engine)
        reading = asyncio.ensure_future(anext(waiting))
        await asyncio.sleep(0)
        transport.deliver(Failure("a step failed"))
        for told in (reading, anext(idle), engine.prepare(PROMPT)):
            with pytest.raises(EngineDead, match="a step failed"):
                await told
        assert engine.is_over.is_set() and not engine.is_open
        assert not await engine.drain()

    @scripted
    async def test_a_step_that_makes_no_sense(self, engine: AsyncEngine, transport: HandTransport) -> None:
        """It ends the engine, and all who wait are told; else they would wait for ever."""
        stream, other = await submit(engine), await submit(engine)
        transport.deliver(Step([Delta(0, 5, [1]), Delta(1, 0, [A])], SchedulerStats()))
        for reader in (stream, other):
            with pytest.raises(EngineDead, match="IndexError"):
                await anext(reader)


class TestThread:
    """With the engine in a thread of its own."""

    @pytest.mark.parametrize(
        ("error", "kind"), [(ValueError("no such model"), ValueError), (OSError("no"), EngineDead)]
    )
    def test_an_engine_that_cannot_be_built(self, error: Exception, kind: type[Exception]) -> None:
        def fail(config: EngineConfig) -> ScriptedEngine:
            raise error

        async def main() -> None:
            await AsyncEngine(transport=ThreadEngineClient(fail)).start()

        before = {*threading.enumerate()}
        with pytest.raises(kind, match=str(error)):
            asyncio.run(asyncio.wait_for(main(), 30))
        assert "engine" not in {thread.name for thread in {*threading.enumerate()} - before}, "it has ended"

    def test_answers_are_those_of_the_synchronous_engine(self) -> None:
        """Text, tokens, log-probabilities, reasons: with stop strings, stop tokens, several answers and special tokens."""
        params = [
            SamplingParams(temperature=0, max_tokens=24),
            SamplingParams(temperature=1, max_tokens=24, seed=1, n=3, logprobs=2),
            SamplingParams(temperature=1, max_tokens=60, seed=2, stop=["e", "zz"], min_tokens=3),
            SamplingParams(temperature=1, max_tokens=60, seed=3, stop=["a", "t"], include_stop_str_in_output=True),
            SamplingParams(temperature=1, max_tokens=60, seed=4, stop_token_ids=list(range(100, 120))),
            SamplingParams(temperature=1, max_tokens=9, seed=5, detokenize=False, logprobs=0),
        ]
        prompts = ["Once upon", [65, 66], "Hello, World", "x", [200, 201, 202], "y"]
        config = {"model": str(tiny_checkpoint()), "max_num_seqs": 4, "use_tqdm": False}
        with LLM(**config) as llm:
            expected = llm.generate(prompts, params, use_tqdm=False)

        async def main() -> list[RequestOutput]:
            async with AsyncEngine(**config) as engine:

                async def last(prompt: str | list[int], params: SamplingParams) -> RequestOutput:
                    deltas = ""
                    async for output in engine.generate(prompt, params):
                        deltas += output.outputs[0].delta_text
                    assert deltas == output.outputs[0].text
                    return output

                outputs = await asyncio.gather(*map(last, prompts, params))
                assert (engine.stats.num_running, engine.stats.kv_blocks_used) == (0, 0)
                return outputs

        def essence(answer: Any) -> Any:
            rows = [[(t.token_id, t.decoded_token) for t in row.values()] for row in answer.logprobs or ()]
            return answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason, rows

        pairs = [
            pair
            for got, wanted in zip(asyncio.run(main()), expected, strict=True)
            for pair in zip(got.outputs, wanted.outputs, strict=True)
        ]
        for ours, theirs in pairs:
            assert essence(ours) == essence(theirs)
            numbers = ([t.logprob for row in a.logprobs or () for t in row.values()] for a in (ours, theirs))
            assert next(numbers) == pytest.approx(next(numbers), abs=1e-4)


def test_what_cannot_be_configured() -> None:
    with pytest.raises(ValueError, match="put seed into it"):
        AsyncEngine(EngineConfig(), seed=1)
    with pytest.raises(ValueError, match="choose one of thread, process"):
        AsyncEngine(transport="pigeon")


def test_a_second_event_loop() -> None:
    """It is told at once, whatever it asks for."""
    transport = HandTransport()
    engine = AsyncEngine(str(tiny_checkpoint()), transport=transport)
    asyncio.run(engine.start())

    async def ask() -> None:
        async for _ in engine.generate([1, 2], SamplingParams(max_tokens=1)):
            pass

    async def call() -> None:
        await engine.call("expert_load")

    for asked in (ask, engine.drain, call):
        with pytest.raises(RuntimeError, match="event loop in which it was started"):
            asyncio.run(asyncio.wait_for(asked(), 30))
