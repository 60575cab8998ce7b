"""`AsyncEngine`: many coroutines ask, one engine answers all of them, a step at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self, TypeVar

from folovllm.config import EngineConfig
from folovllm.electives.server import messages as msg
from folovllm.electives.server.errors import EngineDead, Unavailable
from folovllm.electives.server.metrics import Counters
from folovllm.electives.server.stream import OutputCollector, Stream, add_message
from folovllm.electives.server.transport import EngineClient, ProcessEngineClient, ThreadEngineClient
from folovllm.electives.structured_output.grammar_check import GrammarChecker
from folovllm.electives.structured_output.params import GrammarLimits
from folovllm.engine.input_processor import InputProcessor
from folovllm.engine.inputs import Prompt
from folovllm.engine.setup import EngineSetup
from folovllm.models.files import load_tokenizer
from folovllm.models.generation_defaults import generation_defaults
from folovllm.outputs import RequestOutput
from folovllm.request import Request, Sequence
from folovllm.sampling_params import SamplingParams

logger = logging.getLogger("folovllm")
T = TypeVar("T")
TRANSPORTS = {"thread": ThreadEngineClient, "process": ProcessEngineClient}


class AsyncEngine:
    """An engine that runs beside an event loop.

        async with AsyncEngine("Qwen/Qwen3-0.6B") as engine:
            async for output in engine.generate("Hello", SamplingParams(output_kind=RequestOutputKind.DELTA)):
                print(output.outputs[0].text, end="")

    Use it only in the event loop that started it: any other raises RuntimeError. Prompts are tokenized and text is made here,
    beside the engine, which only looks for stop strings. Once started it has `setup`, `tokenizer` and `processor`.

    Args:
        model: a name, or an `EngineConfig` that says all; the embedded model if left out.
        transport: "thread" (this process; for notebooks, CPUs, tests), "process" (one of its own, over a Unix socket), or
            an `EngineClient`.
        grammar_limits: what it may take to check a request's grammar.
        overrides: fields of the `EngineConfig`.
    """

    def __init__(
        self,
        model: str | EngineConfig | None = None,
        *,
        transport: str | EngineClient = "thread",
        grammar_limits: GrammarLimits | None = None,
        **overrides: Any,
    ) -> None:
        """Raises ValueError for a configuration that cannot be. Nothing is started."""
        if isinstance(model, EngineConfig) and overrides:
            raise ValueError(f"an EngineConfig says all: put {', '.join(overrides)} into it")
        named = {} if model is None else {"model": model}
        self.config = model if isinstance(model, EngineConfig) else EngineConfig(**named, **overrides)
        if isinstance(transport, str) and transport not in TRANSPORTS:
            raise ValueError(f"unknown transport {transport!r}: choose one of {', '.join(TRANSPORTS)}")
        self._transport = TRANSPORTS[transport]() if isinstance(transport, str) else transport
        self._loop: asyncio.AbstractEventLoop | None = None
        self._numbers = itertools.count()
        self._streams: dict[int, Stream] = {}  # of the requests that are not over, by their number
        # Their sequences count as queued up to the first token, or the end of a request that gets none.
        self.num_queued = self.num_queued_tokens = 0  # sequences, and the tokens of their prompts
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self.counters = Counters()
        self._readers = ThreadPoolExecutor(1, "tokenizer")
        self.grammars = GrammarChecker(grammar_limits or GrammarLimits(), self._readers)
        self._is_draining = self._is_closed = False
        self.death: Exception | None = None
        self.is_over = asyncio.Event()  # nothing more comes: it was drained, closed, or died
        self.stats = msg.SchedulerStats()
        self.is_sleeping = False  # its memory was given back for a while (X6)
        self._calls: deque[asyncio.Future[Any]] = deque()  # not answered, in order; the first waits for `Ready`
        self.bring: Callable[[Request], Awaitable[None]] | None = None  # brings K/V of a prompt from elsewhere (X7)
        self.on_seen: Callable[[list[bytes]], object] = lambda pieces: None  # gets what `watch` asks for

    async def start(self) -> None:
        """Build the engine. Raises ValueError where something cannot be had, EngineDead where it ends otherwise."""
        self._loop = asyncio.get_running_loop()
        ready = self._expect_answer()
        try:
            await self._transport.start(self.config, self._deliver)
            self.setup: EngineSetup = pickle.loads(await ready)
            # Not the engine's own tokenizer, in a thread: the library's objects are not for two at once.
            self.tokenizer = await asyncio.to_thread(load_tokenizer, self.setup.path, self.setup.config)
            self.processor = InputProcessor(self.setup, self.tokenizer)
            self.grammars.use(self.tokenizer, self.setup.vocab_size, self.processor.eos_token_ids)
        except BaseException:
            await self._transport.stop()
            raise

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one prompt; what is new comes as it is sampled, as `params.output_kind` says.

        A reader that is slower than the engine gets longer pieces. Closing the generator ends the request.

        Raises:
            ValueError: the id is in use, or the request can never be served.
            EngineDead, Unavailable: the engine has ended, or takes no new requests.
        """
        seqs = await self.prepare(prompt, params, priority=priority, cache_salt=cache_salt)
        await self.bring_prefixes([seqs])
        stream = self.submit(seqs, request_id)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def prepare(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str | None = None
    ) -> list[Sequence]:
        """Tokenize and check a request; returns its sequences, and sends nothing yet. Errors are those of `generate`.

        A text is tokenized in a thread, since a long one takes a while.
        """
        self.require_open()
        if params is None:  # what the model recommends, else our defaults
            params = SamplingParams.from_optional(**generation_defaults(self.setup.path))
        if params.structured_outputs is not None:
            await self.grammars.check(params.structured_outputs)
        process = partial(self.processor.process, "", prompt, params, priority, cache_salt)
        is_text = isinstance(prompt, str) or (isinstance(prompt, Mapping) and prompt.get("prompt_token_ids") is None)
        return await self.in_thread(process) if is_text else process()

    async def bring_prefixes(self, prepared: list[list[Sequence]]) -> None:
        """Before requests are submitted: let K/V of their prompts come from elsewhere, if a role says so."""
        if self.bring is not None:
            await asyncio.gather(*(self.bring(seqs[0].request) for seqs in prepared))

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function that reads long texts, beside the event loop; one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    def submit(
        self, seqs: list[Sequence], request_id: str | None = None, collector: OutputCollector | None = None
    ) -> Stream:
        """Hand a prepared request to the engine. The caller must close the stream. Several streams may share a `collector`.

        Without a `request_id` it is "request-N". Raises ValueError if the id is in use, and what `require_open` raises.
        """
        self.require_open()
        if request_id is not None and self._named(request_id):
            raise ValueError(f"request id {request_id!r} is in use: choose another, or wait until it has finished")
        number = next(self._numbers)
        request_id = f"request-{number}" if request_id is None else request_id
        stream = Stream(number, request_id, seqs, time.monotonic(), collector or OutputCollector(), self._abort)
        self._transport.send(add_message(number, seqs[0].request))
        self._streams[number] = stream  # only now: what cannot be sent takes no place in the queue
        self._count_queued(stream, 1)
        self._is_idle.clear()
        return stream

    def abort(self, request_id: str) -> None:
        """End a request; its reader gets what there is, with finish_reason "abort". Does nothing if the request is over."""
        for stream in self._named(request_id):
            self._abort(stream)

    def _named(self, request_id: str) -> list[Stream]:
        """The open request of an id, if there is one."""
        return [stream for stream in self._streams.values() if stream.request_id == request_id]

    def _abort(self, stream: Stream) -> None:
        if stream.number in self._streams:
            stream.abort(time.monotonic())
            self._remove(stream)
            self._transport.send(msg.Abort(stream.number))

    def _abort_all(self) -> None:
        for stream in list(self._streams.values()):
            self._abort(stream)

    async def drain(self, seconds: float | None = None) -> bool:
        """Take no new requests, and wait until those that run have ended; after `seconds` the rest is aborted. Returns whether none was."""
        self._require_loop()
        self._is_draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._is_idle.wait()
        except TimeoutError:
            self._abort_all()
            return False
        finally:
            self.is_over.set()
        return self.death is None

    async def close(self) -> None:
        """End the engine and the requests that it still works on. A second call does nothing."""
        self._is_draining = self._is_closed = True
        self._abort_all()
        await self._transport.stop()
        self._end(Unavailable("the engine was closed"))
        self.grammars.close()
        self._readers.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def watch(self, is_on: bool) -> None:
        """Begin a recording of the engine (`folovllm.apps.inspector`), or end it. `on_seen` gets its pieces, about 15 times a second.

        A second `watch(True)` begins it anew, for a reader that joins.
        """
        if self.is_open:
            self.call("watch", is_on)

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call a method of the engine (`PacedEngine`), between two steps. The future has what it returns.

        Raises:
            ValueError: in the future, with the method's sentence.
            EngineDead, Unavailable: the engine has ended, now or before it answered.
        """
        self.require_open(awake=False)
        called = self._expect_answer()
        self._transport.send(msg.Call(method, list(arguments)))
        return called

    def _expect_answer(self) -> asyncio.Future[Any]:
        self._calls.append(asyncio.get_running_loop().create_future())
        return self._calls[-1]

    def _answer(self, value: Any, error: Exception | None = None) -> None:
        """Answer the call that waits longest. Its client may have left."""
        if (call := self._calls.popleft()).done():
            return
        if error is None:
            call.set_result(value)
        else:
            call.set_exception(error)
            call.exception()  # nobody need look at it

    def _end(self, error: Exception) -> None:
        """The engine has ended: tell all who wait for it."""
        self.is_over.set()
        while self._calls:
            self._answer(None, error)
        for stream in list(self._streams.values()):
            self._remove(stream, EngineDead(str(error)))

    def _require_loop(self) -> None:
        """Raise RuntimeError in another event loop than that of `start`: what happens there would wake nobody here."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("an AsyncEngine is for the event loop in which it was started: make another one here")

    @property
    def is_open(self) -> bool:
        """Whether new requests are taken."""
        return self.death is None and not self._is_draining

    def require_open(self, awake: bool = True) -> None:
        """Raise `EngineDead` or `Unavailable` unless the engine runs, and is `awake`; RuntimeError in another event loop than that of `start`."""
        self._require_loop()
        if self.death is not None:
            raise EngineDead(str(self.death))
        if self._is_draining:
            raise Unavailable("the engine is shutting down and takes no new requests: ask another, or later")
        if awake and self.is_sleeping:
            raise Unavailable("the engine sleeps: wake it up first, a server by POST /wake_up")

    @property
    def num_open(self) -> int:
        """How many requests the engine works on."""
        return len(self._streams)

    def _deliver(self, message: msg.EngineMessage) -> None:
        """Take in a message from the engine. An error here would leave readers waiting for ever, so it ends the engine."""
        match message:
            case msg.Step():
                try:
                    self.stats = message.stats
                    self._update(message, time.monotonic())
                except Exception as error:
                    logger.exception("a step's outputs could not be taken in")
                    self._deliver(msg.Failure(f"{type(error).__name__}: {error}"))
            case msg.Seen():
                self.on_seen(message.pieces)
            case msg.Called():
                self.is_sleeping = message.is_sleeping
                self._answer(message.value, None if message.error is None else ValueError(message.error))
            case msg.Ready():
                self._answer(message.setup)
            case msg.Failure() if self.death is None and not self._is_closed:
                self.death = EngineDead(message.message)
                self._end(ValueError(message.message) if message.is_user_error else self.death)

    def _update(self, step: msg.Step, now: float) -> None:
        """Give each request what the step brought for it. Those that end leave."""
        before = Counter[float]()  # when answers got the tokens before these: mostly one step ago, all of them
        for delta in step.deltas:
            if (stream := self._streams.get(delta.number)) is None:
                continue  # it was aborted here
            if delta.token_ids:
                if not stream.has_begun:
                    self._count_queued(stream, -1)
                    self.counters.record_start(stream, now)
                if (last := stream.newest[delta.index]) is not None:
                    before[last] += 1
                self.counters.generation_tokens += len(delta.token_ids)
            stream.feed(delta, now)
            if stream.is_finished:
                self._remove(stream)
        self.counters.record_step(now, before, step.queue_times)
        for refused in step.refused:
            if (stream := self._streams.get(refused.number)) is not None:
                self._remove(stream, ValueError(refused.message))

    def _count_queued(self, stream: Stream, times: int) -> None:
        self.num_queued += times * len(stream.seqs)
        self.num_queued_tokens += times * stream.metrics.num_prompt_tokens

    def _remove(self, stream: Stream, error: Exception | None = None) -> None:
        """The engine works on it no more. An error goes to its reader, and no counter counts the request."""
        del self._streams[stream.number]
        if not stream.has_begun:
            self._count_queued(stream, -1)
        if error is None:
            self.counters.record_end(stream)
        else:
            stream.fail(error)
        if not self._streams:
            self._is_idle.set()
