"""An engine to play with: built anew in a moment with other settings, slowed down, held, and fed from the page."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from folovllm.config import PRESETS, EngineConfig
from folovllm.inspector.live import Subscribers
from folovllm.sampling_params import SamplingParams
from folovllm.server.async_engine import AsyncEngine, EngineDead
from folovllm.server.messages import Pace
from folovllm.server.stream import Stream
from folovllm.server.transport import ProcessTransport, ThreadTransport, Transport

LONGEST = 128  # tokens of a prompt and its answer: few enough to watch
MOST_PROMPTS, MOST_TOKENS, MOST_DELAY, MOST_STEPS = 64, LONGEST, 2.0, 1000


@dataclass(slots=True, frozen=True)
class Settings:
    """What the page's sliders say. In every milestone the memory is the same: `num_kv_blocks` blocks of `block_size` tokens."""

    milestone: str = "m5"
    num_kv_blocks: int = 48
    block_size: int = 8
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 64
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True

    def with_changes(self, changes: dict[str, Any]) -> Settings:
        """These with others in their place. Raises ValueError for one that is none, or of a wrong kind."""
        known = {field.name: field for field in FIELDS}
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"there is no setting {name!r}: known are {', '.join(known)}")
            known[name].check(value)
        return Settings(**asdict(self) | changes)

    def overrides(self) -> dict[str, Any]:
        """The fields of `EngineConfig` that they mean in this milestone.

        A contiguous cache has as many slots as fit into the memory; M1 has no pool, and serves one request at a time.
        """
        memory = self.num_kv_blocks * self.block_size
        length = min(LONGEST, memory)
        chunks = self.enable_chunked_prefill and self.milestone != "m1"
        if not chunks:
            length = min(length, max(2, self.max_num_batched_tokens))
        chosen: dict[str, Any] = {"milestone": self.milestone, "max_model_len": length}
        chosen["max_num_batched_tokens"] = self.max_num_batched_tokens
        if self.milestone == "m1":
            return chosen
        chosen |= {"max_num_seqs": self.max_num_seqs, "enable_chunked_prefill": chunks}
        if self.milestone == "m2":
            return chosen | {"num_kv_blocks": max(1, memory // length)}
        pages = {"num_kv_blocks": self.num_kv_blocks, "block_size": self.block_size}
        return chosen | pages | {"enable_prefix_caching": self.enable_prefix_caching}


@dataclass(slots=True, frozen=True)
class Field:
    """A slider: a number from `min` to `max`, a choice or a switch."""

    name: str
    help: str
    choices: tuple[Any, ...] = ()
    min: int = 0
    max: int = 0
    step: int = 1

    @property
    def kind(self) -> str:
        """What the page shows."""
        return "choice" if self.choices else "number" if self.max else "switch"

    def check(self, value: Any) -> None:
        """Raise ValueError unless the value may be."""
        if self.choices and value not in self.choices:
            raise ValueError(f"{self.name} must be one of {', '.join(map(str, self.choices))}, not {value!r}")
        if self.kind == "switch" and not isinstance(value, bool):
            raise ValueError(f"{self.name} must be true or false, not {value!r}")
        if self.kind == "number" and not (type(value) is int and self.min <= value <= self.max):
            raise ValueError(f"{self.name} must be a whole number from {self.min} to {self.max}, not {value!r}")

    def described(self, value: Any) -> dict[str, Any]:
        """As the page is told."""
        said: dict[str, Any] = {"name": self.name, "kind": self.kind, "value": value, "help": self.help}
        if self.kind == "choice":
            said["choices"] = self.choices
        elif self.kind == "number":
            said |= {"min": self.min, "max": self.max, "step": self.step}
        return said


FIELDS = (
    Field("milestone", "the preset", tuple(PRESETS)),
    Field("num_kv_blocks", "blocks of the KV cache", min=2, max=512),
    Field("block_size", "tokens a block holds", (4, 8, 16, 32)),
    Field("max_num_seqs", "most sequences in a step", min=1, max=64),
    Field("max_num_batched_tokens", "most tokens in a step", min=8, max=1024, step=8),
    Field("enable_chunked_prefill", "compute long prompts over several steps"),
    Field("enable_prefix_caching", "find the K/V of prefixes that were computed before"),
)
assert [field.name for field in FIELDS] == [field.name for field in fields(Settings)]


class Playground:
    """The engine of the moment, and what the page may ask of it."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        """`overrides` are fields of `EngineConfig`; those that the page has sliders for are where these begin."""
        sliders = {field.name for field in FIELDS}
        self.settings = Settings().with_changes({k: v for k, v in overrides.items() if k in sliders})
        self._overrides = {"num_threads": 1, "use_tqdm": False}
        self._overrides |= {k: v for k, v in overrides.items() if k not in sliders}
        self.delay, self.is_held = 0.1, False
        self.subscribers = Subscribers(self._watch)
        self._engine: AsyncEngine | None = None
        self._transport: Transport | None = None
        self._streams: dict[Stream, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()

    @property
    def runs_mine(self) -> bool:
        """Whether a learner's code runs: in a process of its own, which loads it anew and can be ended whatever it does."""
        return bool(os.environ.get("FOLOVLLM_MINE"))

    @property
    def error(self) -> str | None:
        """How the engine ended, if it did by itself."""
        return None if self._engine is None or self._engine.death is None else str(self._engine.death)

    def described(self) -> dict[str, Any]:
        """What the page shows beside the recording."""
        values = asdict(self.settings)
        return {
            "fields": [field.described(values[field.name]) for field in FIELDS],
            "mine": int(self.runs_mine),
            "error": self.error,
            "delay": self.delay,
            "paused": int(self.is_held),
        }

    async def build(self, changes: dict[str, Any]) -> None:
        """Put an engine with these settings in the place of the one that is there.

        Raises:
            ValueError: a setting that cannot be. The old engine stays.
        """
        async with self._turn:
            settings = self.settings.with_changes(changes)
            config = EngineConfig(**self._overrides | settings.overrides())
            transport: Transport = ProcessTransport() if self.runs_mine else ThreadTransport()
            engine = AsyncEngine(config, transport=transport)
            await engine.start()
            old, self._engine, self._transport, self.settings = self._engine, engine, transport, settings
            engine.on_seen = self.subscribers.publish
            transport.send(Pace(self.delay, self.is_held))
            if old is not None:
                old.on_seen = lambda pieces: None
                await old.close()
            self.subscribers.begin_anew()

    async def ask(
        self, prompts: list[str], max_tokens: int = 64, temperature: float = 0.7, seed: int | None = None
    ) -> list[str]:
        """Queue prompts, and return their requests' ids. Raises ValueError for what can never be served: then none is."""
        engine = self._running()
        if not prompts or len(prompts) > MOST_PROMPTS:
            raise ValueError(f"send from 1 to {MOST_PROMPTS} prompts, not {len(prompts)}")
        if not 1 <= max_tokens <= MOST_TOKENS:
            raise ValueError(f"max_tokens must be from 1 to {MOST_TOKENS}, not {max_tokens}")
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        prepared = [await engine.prepare(prompt, params) for prompt in prompts]
        streams = [engine.submit(each) for each in prepared]
        for stream in streams:
            self._streams[stream] = task = asyncio.create_task(_read(stream))
            task.add_done_callback(lambda _, stream=stream: self._streams.pop(stream))  # type: ignore[misc]
        return [str(stream.number) for stream in streams]  # by which the engine knows them

    def abort(self, request: str | None) -> None:
        """End a request, or all; what is over already stays as it is."""
        engine = self._running()
        for stream in [stream for stream in self._streams if request in (None, str(stream.number))]:
            engine.abort(stream.request_id)

    def change_pace(self, delay: float | None = None, paused: bool | None = None, step: int = 0) -> None:
        """Slow the engine down, hold it, or let it take some steps while it is held. Raises ValueError for what cannot be."""
        if delay is not None and not 0 <= delay <= MOST_DELAY:
            raise ValueError(f"delay must be from 0 to {MOST_DELAY:.0f} seconds, not {delay!r}")
        if not 0 <= step <= MOST_STEPS:
            raise ValueError(f"step must be from 0 to {MOST_STEPS}, not {step!r}")
        self.delay = self.delay if delay is None else delay
        self.is_held = self.is_held if paused is None else paused
        if self._transport is not None:
            self._transport.send(Pace(self.delay, self.is_held, step))

    async def close(self) -> None:
        """End it."""
        self.subscribers.close()
        if self._engine is not None:
            await self._engine.close()

    def _running(self) -> AsyncEngine:
        assert self._engine is not None, "built before anybody can ask"
        self._engine.require_open()
        return self._engine

    def _watch(self, is_on: bool) -> None:
        if self._engine is not None:
            self._engine.watch(is_on)


async def _read(stream: Stream) -> None:
    """Read an answer to its end: the page sees it in the recording."""
    try:
        async for _ in stream:
            pass
    except EngineDead:
        return  # the page is told by the stream of events, and by `Playground.error`
