"""An engine to play with: built anew in a moment with other settings, slowed down, held, and fed from the page."""

from __future__ import annotations

import asyncio
import importlib
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from folovllm.apps.inspector.live import Subscribers
from folovllm.apps.inspector.scenes import VOCABULARY, Sampling, Scene, params_of, scenes
from folovllm.config import PRESETS, EngineConfig
from folovllm.electives.server.errors import Unavailable
from folovllm.sampling_params import SamplingParams

if TYPE_CHECKING:  # the page is there before torch is
    from folovllm.electives.server.async_engine import AsyncEngine
    from folovllm.electives.server.stream import Stream

LONGEST = 160  # tokens of a prompt and its answer: few enough to watch
HOST_MEMORY = "16MiB"  # for evicted blocks
MOST_PROMPTS, MOST_TOKENS, MOST_DELAY, MOST_STEPS = 64, LONGEST, 2.0, 1000


@dataclass(slots=True, frozen=True)
class Control:
    """A control of the page: a number from `min` to `max`, a choice, or else a switch."""

    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    min: int = 0
    max: int = 0
    step: int = 1

    @property
    def kind(self) -> str:
        """What the page shows."""
        return "choice" if self.choices else "number" if self.max else "switch"

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError unless the value is allowed."""
        is_number = type(value) is int and self.min <= value <= self.max
        allowed = {
            "choice": (value in self.choices, f"one of {', '.join(map(str, self.choices))}"),
            "switch": (isinstance(value, bool), "true or false"),
            "number": (is_number, f"a whole number from {self.min} to {self.max}"),
        }
        if not allowed[self.kind][0]:
            raise ValueError(f"{name} must be {allowed[self.kind][1]}, not {value!r}")

    def described(self, name: str, value: Any) -> dict[str, Any]:
        """What the page gets to know of it."""
        return {"name": name, "kind": self.kind, "value": value} | asdict(self)


CONTROLS = {  # by field of `EngineConfig`
    "milestone": Control("m5", "the preset", tuple(PRESETS)),
    "num_kv_blocks": Control(48, "blocks of the KV cache", min=2, max=512),
    "block_size": Control(8, "tokens a block holds", (1, 4, 8, 16, 32)),
    "max_num_seqs": Control(6, "most sequences in a step", min=1, max=64),
    "max_num_batched_tokens": Control(64, "most tokens in a step", min=8, max=1024, step=8),
    "enable_chunked_prefill": Control(True, "compute long prompts over several steps"),
    "enable_prefix_caching": Control(True, "find the K/V of prefixes that were computed before"),
    "draft_tokens": Control(
        0, "tokens that a proposer drafts for each step (none: 0), and the model verifies", (0, 1, 2, 4, 8)
    ),
    "draft_head": Control(False, "a head of the embedded model drafts these tokens, instead of a small model"),
    "experts": Control(False, "the embedded mixture of experts instead of the dense model"),
    "offload": Control(False, "keep evicted blocks in host memory, and bring them back"),
    "states": Control(False, "the embedded hybrid model, with a snapshot every 16 tokens, instead of the dense model"),
}
Settings = dict[str, Any]  # a value for each
DEFAULTS: Settings = {name: control.default for name, control in CONTROLS.items()}


def changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    """The settings with others in their place. Raises ValueError for one that does not exist, or a value that is not allowed."""
    for name, value in changes.items():
        if name not in CONTROLS:
            raise ValueError(f"there is no setting {name!r}: known are {', '.join(CONTROLS)}")
        CONTROLS[name].check(name, value)
    return settings | changes


def config_fields(settings: Settings, model: str | None = None) -> dict[str, Any]:
    """The fields of `EngineConfig` for these settings, and for `model` if it is not an embedded one.

    Every milestone gets the same memory. A contiguous cache (M2) has as many slots as fit into it; M1 has no pool, serves one
    request at a time, and neither speculates nor counts experts.
    """
    milestone, budget = settings["milestone"], settings["max_num_batched_tokens"]
    memory = settings["num_kv_blocks"] * settings["block_size"]
    chunks = settings["enable_chunked_prefill"] and milestone != "m1"
    length = min(LONGEST, memory) if chunks else min(LONGEST, memory, max(2, budget))
    chosen = {"milestone": milestone, "max_model_len": length, "max_num_batched_tokens": budget}
    chosen["max_logprobs"] = VOCABULARY
    if settings["experts"] and model is None:
        chosen["model"] = "stories-moe"
    elif settings["states"] and model is None:
        chosen |= {"model": "stories-hybrid", "snapshot_interval": 16, "num_snapshots": 6}
    if milestone == "m1":
        return chosen
    chosen |= {"max_num_seqs": settings["max_num_seqs"], "enable_chunked_prefill": chunks}
    chosen |= {"count_experts": settings["experts"] and model is None} | _speculation(settings, model)
    if milestone == "m2":
        return chosen | {"num_kv_blocks": max(1, memory // length)}
    if settings["offload"] and settings["enable_prefix_caching"] and not settings["states"]:
        chosen["kv_offload"] = HOST_MEMORY
    return chosen | {name: settings[name] for name in ("num_kv_blocks", "block_size", "enable_prefix_caching")}


def _speculation(settings: Settings, model: str | None) -> dict[str, Any]:
    """Draft tokens at every step: by the embedded draft model or head, or by n-grams for a model that these were not made for."""
    if not settings["draft_tokens"]:
        return {}
    has_head, has_states = settings["draft_head"], settings["states"]
    if model or (has_head and settings["experts"]):
        method = {"method": "ngram"}
    elif has_head:
        method = {"method": "mtp"} if has_states else {"method": "eagle3", "model": "stories-eagle3"}
    else:
        method = {"method": "draft_model", "model": "stories-draft"}
    return {"speculative_config": method | {"num_speculative_tokens": settings["draft_tokens"], "adaptive": False}}


def _require_range(name: str, value: float, least: float, most: float) -> float:
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, not {value}")
    return value


class Playground:
    """The engine of the moment, and what the page may ask of it."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        """`overrides` are fields of `EngineConfig`; those that the page has controls for are where these begin."""
        self.settings = changed(DEFAULTS, {name: overrides[name] for name in CONTROLS.keys() & overrides})
        others = {name: value for name, value in overrides.items() if name not in CONTROLS}
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
        shown = [(name, control) for name, control in CONTROLS.items() if name not in hidden]
        fields = [control.described(name, self.settings[name]) for name, control in shown]
        told = {"mine": int(self.runs_mine), "loading": self.loading, "error": self.error}
        return {"fields": fields, "delay": self.delay, "paused": int(self.is_held)} | told

    async def build(self, changes: dict[str, Any]) -> None:
        """Put an engine with these settings in the place of the one that is there. The first time this imports torch.

        Raises:
            ValueError: a setting that cannot be. The old engine stays.
        """
        async with self._turn:
            self._stop_arrivals()
            settings = changed(self.settings, changes)
            config = EngineConfig(**self._overrides | config_fields(settings, self._overrides.get("model")))
            engine = await self._started(config)
            old, self._engine, self.settings = self._engine, engine, settings
            self._streams = []
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
        if scene not in scenes():
            raise ValueError(f"there is no scene {scene!r}: known are {', '.join(scenes())}")
        found = scenes()[scene]
        await self.build(DEFAULTS | found.engines[-1])
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
        self, prompts: list[str], max_tokens: int = 64, temperature: float = 0.7, seed: int | None = None,
        sampling: Sampling | None = None,
    ) -> dict[str, list[str]]:  # fmt: skip
        """Queue prompts, and return their requests' ids. Raises ValueError for what can never be served: then none is."""
        _require_range("the number of prompts", len(prompts), 1, MOST_PROMPTS)
        _require_range("max_tokens", max_tokens, 1, MOST_TOKENS)
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

    async def change_pace(self, delay: float | None = None, paused: bool | None = None, step: int = 0) -> None:
        """Slow the engine down, hold it, or let it take some steps while it is held. Raises ValueError for what cannot be."""
        self.delay = _require_range("delay", self.delay if delay is None else delay, 0, MOST_DELAY)
        _require_range("step", step, 0, MOST_STEPS)
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
            raise Unavailable(f"{self.loading}: ask again in a moment")
        self._engine.require_open()
        return self._engine

    def _watch(self, is_on: bool) -> None:
        if self._engine is not None:
            self._engine.watch(is_on)
