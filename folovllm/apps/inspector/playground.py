"""An engine to play with: built anew in a moment with other settings, slowed down, held, and fed from the page."""

from __future__ import annotations

import asyncio
import importlib
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from folovllm.apps.inspector.live import Subscribers
from folovllm.apps.inspector.scenes import VOCABULARY, Sampling, Scene, params_of, scenes
from folovllm.config import EngineConfig
from folovllm.electives.server.errors import Unavailable
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # the page is there before torch is
    from folovllm.electives.server.async_engine import AsyncEngine
    from folovllm.electives.server.stream import Stream

LONGEST = 160  # tokens of a prompt and its answer: few enough to watch
HOST_MEMORY = "16MiB"  # for evicted blocks


def number(least: int, most: int, says: str, step: int = 1) -> Meta:
    """A slider of the page, which stops at every `step`."""
    return Meta(ge=least, le=most, description=says, extra_json_schema={"multipleOf": step})


def says(help: str) -> Meta:
    """What the page says of a choice, or of a switch."""
    return Meta(description=help)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the page has controls for; it makes them of the JSON Schema. Most are fields of `EngineConfig`."""

    milestone: Annotated[Literal["m1", "m2", "m3", "m4", "m5", "m6"], says("the preset")] = "m5"
    num_kv_blocks: Annotated[int, number(2, 512, "blocks of the KV cache")] = 48
    block_size: Annotated[Literal[1, 4, 8, 16, 32], says("tokens a block holds")] = 8
    max_num_seqs: Annotated[int, number(1, 64, "most sequences in a step")] = 6
    max_num_batched_tokens: Annotated[int, number(8, 1024, "most tokens in a step", 8)] = 64
    enable_chunked_prefill: Annotated[bool, says("compute long prompts over several steps")] = True
    enable_prefix_caching: Annotated[bool, says("find the K/V of prefixes that were computed before")] = True
    draft_tokens: Annotated[
        Literal[0, 1, 2, 4, 8],
        says("tokens that a proposer drafts for each step (none: 0), and the model verifies"),
    ] = 0
    draft_head: Annotated[bool, says("a head of the embedded model drafts these tokens, instead of a small model")] = (
        False
    )
    experts: Annotated[bool, says("the embedded mixture of experts instead of the dense model")] = False
    offload: Annotated[bool, says("keep evicted blocks in host memory, and bring them back")] = False
    states: Annotated[
        bool, says("the embedded hybrid model, with a snapshot every 16 tokens, instead of the dense model")
    ] = False

    def changed(self, changes: dict[str, Any]) -> Settings:
        """With other values. Raises ValueError for a setting that does not exist, or a value that is not allowed."""
        try:
            return msgspec.convert(msgspec.structs.asdict(self) | changes, Settings)
        except msgspec.ValidationError as error:
            choices = [f"{name} {', '.join(map(str, f['enum']))}" for name, f in schemas().items() if "enum" in f]
            raise ValueError(f"the playground cannot be set so: {error} (choices: {'; '.join(choices)})") from error


def schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of each setting."""
    properties: dict[str, dict[str, Any]] = msgspec.json.schema(Settings)["$defs"]["Settings"]["properties"]
    return properties


def config_fields(settings: Settings, model: str | None = None) -> dict[str, Any]:
    """The fields of `EngineConfig` for these settings, and for `model` if it is not an embedded one.

    Every milestone gets the same memory. A contiguous cache (M2) has as many slots as fit into it; M1 has no pool, serves one
    request at a time, and neither speculates nor counts experts.
    """
    milestone, memory = settings.milestone, settings.num_kv_blocks * settings.block_size
    chunks, has_experts = settings.enable_chunked_prefill and milestone != "m1", settings.experts and model is None
    length = min(LONGEST, memory) if chunks else min(LONGEST, memory, settings.max_num_batched_tokens)
    fields: dict[str, Any] = {"milestone": milestone, "max_model_len": length, "max_logprobs": VOCABULARY}
    fields["max_num_batched_tokens"] = settings.max_num_batched_tokens
    if has_experts:
        fields["model"] = "stories-moe"
    elif settings.states and model is None:
        fields |= {"model": "stories-hybrid", "snapshot_interval": 16, "num_snapshots": 6}
    if milestone == "m1":
        return fields
    fields |= {"max_num_seqs": settings.max_num_seqs, "enable_chunked_prefill": chunks, "count_experts": has_experts}
    if settings.draft_tokens:
        draft = _proposer(settings, model) | {"num_speculative_tokens": settings.draft_tokens, "adaptive": False}
        fields["speculative_config"] = draft
    if milestone == "m2":
        return fields | {"num_kv_blocks": max(1, memory // length)}
    if settings.offload and settings.enable_prefix_caching and not settings.states:
        fields["kv_offload"] = HOST_MEMORY
    fields |= {"num_kv_blocks": settings.num_kv_blocks, "block_size": settings.block_size}
    return fields | {"enable_prefix_caching": settings.enable_prefix_caching}


def _proposer(settings: Settings, model: str | None) -> dict[str, str]:
    """Who drafts: the embedded draft model or head, or n-grams for a model that these were not made for."""
    if model or (settings.draft_head and settings.experts):
        return {"method": "ngram"}
    if not settings.draft_head:
        return {"method": "draft_model", "model": "stories-draft"}
    return {"method": "mtp"} if settings.states else {"method": "eagle3", "model": "stories-eagle3"}


class Playground:
    """The engine of the moment, and what the page may ask of it."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        """`overrides` are fields of `EngineConfig`; those that the page has controls for are where these begin."""
        controlled = overrides.keys() & set(Settings.__struct_fields__)
        self.settings = Settings().changed({name: overrides[name] for name in controlled})
        others = {name: value for name, value in overrides.items() if name not in controlled}
        self._overrides = {"num_threads": 1, "use_tqdm": False} | others
        self.delay, self.is_held = 0.1, False
        self.loading: str | None = "the engine is not there yet"
        self.has_flags = bool(overrides)
        self.subscribers = Subscribers(self._watch)
        self._engine: AsyncEngine | None = None
        self._streams: list[Stream] = []  # nobody reads them: the page sees the answers in the recording
        self._arriving: asyncio.Task[None] | None = None  # the requests of a scene
        self._turn = asyncio.Lock()

    @property
    def runs_mine(self) -> bool:
        """Whether a learner's code runs: in a process of its own, which loads it anew and can be ended whatever it does."""
        return bool(os.environ.get("FOLOVLLM_MINE"))

    @property
    def error(self) -> str | None:
        """How the engine ended, if it did by itself; else why a scene's request could not be served."""
        if self._engine is not None and self._engine.death is not None:
            return str(self._engine.death)
        task = self._arriving
        refused = task.exception() if task is not None and task.done() and not task.cancelled() else None
        return None if refused is None else str(refused)

    def described(self) -> dict[str, Any]:
        """What the page shows beside the recording. `loading` is what the engine waits for, until it is there."""
        hidden = ("experts", "states") if "model" in self._overrides else ()  # those choose an embedded model
        shown = {name: field for name, field in schemas().items() if name not in hidden}
        told = {"fields": shown, "values": msgspec.structs.asdict(self.settings), "mine": self.runs_mine}
        pace = {"delay": self.delay, "paused": self.is_held}
        return told | pace | {"loading": self.loading, "error": self.error}

    async def build(self, changes: dict[str, Any]) -> None:
        """Put an engine with these settings in the place of the one that is there. The first time this imports torch.

        Raises:
            ValueError: a setting that cannot be. The old engine stays.
        """
        async with self._turn:
            self._stop_arrivals()
            settings = self.settings.changed(changes)
            fields = config_fields(settings, self._overrides.get("model"))
            engine = await self._started(EngineConfig(**self._overrides | fields))
            old, self._engine, self.settings, self._streams = self._engine, engine, settings, []
            engine.on_seen = self.subscribers.publish
            engine.call("set_pace", self.delay, self.is_held)
            if old is not None:
                old.on_seen = lambda pieces: None
                await old.close()
            self.subscribers.begin_anew()

    async def _started(self, config: EngineConfig) -> AsyncEngine:
        """An engine that runs. `loading` says what it waits for meanwhile, and is None afterwards, also where there can be none."""
        try:
            self.loading = "PyTorch is imported (1 of 2)"
            engines = await asyncio.to_thread(importlib.import_module, "folovllm.electives.server.async_engine")
            self.loading = "the engine is built (2 of 2)"
            engine: AsyncEngine = engines.AsyncEngine(config, transport="process" if self.runs_mine else "thread")
            await engine.start()
        finally:
            self.loading = None
        return engine

    async def play(self, scene: str, sampling: Sampling | None = None) -> None:
        """Build the engine of a scene, the last of several, and let its requests come one after the other, as in its recording.

        `sampling`: the reader's choice, for a scene that has one. Raises ValueError for a scene that does not exist.
        """
        if (found := scenes().get(scene)) is None:
            raise ValueError(f"there is no scene {scene!r}: known are {', '.join(scenes())}")
        await self.build(msgspec.structs.asdict(Settings()) | found.engines[-1])
        self._arriving = asyncio.create_task(self._arrive(found, params_of(sampling or found.sampling)))

    async def _arrive(self, scene: Scene, sampling: dict[str, Any]) -> None:
        """Ask what the scene asks: a request that comes n turns later comes n delays later."""
        turn = 0
        for request in scene.requests:
            await asyncio.sleep((request.turn - turn) * max(self.delay, 0.02))
            turn = request.turn
            params = SamplingParams(**sampling, max_tokens=request.max_tokens, ignore_eos=True)
            await self._submit([request.prompt], params)

    def _stop_arrivals(self) -> None:
        if self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    async def ask(
        self,
        prompts: Annotated[list[str], Meta(min_length=1, max_length=64)],
        max_tokens: Annotated[int, Meta(ge=1, le=LONGEST)] = 64,
        temperature: float = 0.7,
        seed: int | None = None,
        sampling: Sampling | None = None,
    ) -> dict[str, list[str]]:
        """Queue prompts, and return their requests' ids. Raises ValueError for what can never be served: then none is."""
        chosen = {"temperature": temperature, "seed": seed} if sampling is None else params_of(sampling)
        return {"requests": await self._submit(prompts, SamplingParams(max_tokens=max_tokens, **chosen))}

    async def _submit(self, prompts: list[str], params: SamplingParams) -> list[str]:
        engine = self._running()
        prepared = [await engine.prepare(prompt, params) for prompt in prompts]
        streams = [engine.submit(each) for each in prepared]
        self._streams = [stream for stream in self._streams if not stream.is_finished] + streams
        return [str(stream.number) for stream in streams]  # by which the engine knows them

    async def abort(self, request: str | None = None) -> None:
        """End a request, or all; what is over already stays as it is."""
        engine = self._running()
        if request is None:
            self._stop_arrivals()
        for stream in self._streams:
            if request in (None, str(stream.number)):
                engine.abort(stream.request_id)

    async def change_pace(
        self,
        delay: Annotated[float, Meta(ge=0, le=2)] | None = None,
        paused: bool | None = None,
        step: Annotated[int, Meta(ge=0, le=1000)] = 0,
    ) -> None:
        """Slow the engine down, to `delay` seconds a step, hold it, or let it take some steps while it is held."""
        self.delay = self.delay if delay is None else delay
        self.is_held = self.is_held if paused is None else paused
        if self._engine is not None and self._engine.is_open:
            self._engine.call("set_pace", self.delay, self.is_held, step)

    async def close(self) -> None:
        """End it."""
        self._stop_arrivals()
        self.subscribers.close()
        if self._engine is not None:
            await self._engine.close()

    def _running(self) -> AsyncEngine:
        if self._engine is None:
            raise Unavailable(f"{self.loading or 'there is no engine'}: ask again in a moment")
        self._engine.require_open()
        return self._engine

    def _watch(self, is_on: bool) -> None:
        if self._engine is not None:
            self._engine.watch(is_on)
