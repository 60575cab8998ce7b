"""Loads an engine of mini, plays requests through it, and checks every step.

    adapters = load(Path("mine/mini"))
    trace = play(adapters, folder, Trace(limits, asks), stage=2)

A check that fails raises `Rejected`, whose message names the step, the request, the token or the block.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from milestones.mini.given.contract import Device, Limits, Step
from milestones.mini.ledger import Ask, Ledger, Rejected

HERE = Path(__file__).parent
GIVEN, REFERENCE = HERE / "given", HERE / "reference"
ENGINES = ("folovllm", "vllm", "sglang")  # not there for an engine of mini
FORBIDDEN = (*ENGINES, "milestones")


# -- to load an engine -----------------------------------------------------------------------------------------------

loaded: Path | None = None  # what `load` was called with last


def load(path: Path) -> ModuleType:
    """Load `adapters.py` of a folder, or one file that builds on the reference's modules. The modules of an engine loaded before go.

    Raises:
        ValueError: there is no such file, or something in it imports an engine.
    """
    global loaded
    file = path / "adapters.py" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"there is no {file}: `python -m milestones build mini` makes it")
    for source in sorted(path.glob("*.py")) if path.is_dir() else [file]:
        _refuse_engines(source)
    for name in {source.stem for folder in _folders(loaded) + _folders(path) for source in folder.glob("*.py")}:
        sys.modules.pop(name, None)
    loaded = path
    spec = importlib.util.spec_from_file_location("adapters", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["adapters"] = module
    with engine_runs():
        spec.loader.exec_module(module)
    return module


def _folders(path: Path | None) -> list[Path]:
    """Where the modules are of the engine that `load` finds at this path."""
    return [GIVEN, path if path.is_dir() else REFERENCE] if path else []


@contextmanager
def engine_runs() -> Iterator[None]:
    """While the engine's code runs: its files find each other, and `sys.modules` has None for every module of an engine.

    Raises:
        Rejected: it imports one all the same.
    """
    folders = [*map(str, _folders(loaded))]
    hidden = {name: sys.modules[name] for name in [*sys.modules] if name.partition(".")[0] in ENGINES}
    sys.path[:0] = folders
    sys.modules.update(dict.fromkeys([*hidden, *ENGINES]))  # type: ignore[arg-type]  # so an import of it fails
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ENGINES:
            raise
        raise Rejected(f"the engine imports {error.name}: mini is an engine of your own") from error
    finally:
        del sys.path[: len(folders)]
        for name in ENGINES:
            del sys.modules[name]
        sys.modules.update(hidden)


def _refuse_engines(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text("utf-8"), str(file))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.split(".")[0] in FORBIDDEN:
                raise ValueError(f"{file.name}, line {node.lineno} imports {name}: mini is an engine of your own")  # type: ignore[attr-defined]


def make(adapters: ModuleType, folder: Path, limits: Limits, device: Device, stage: int) -> Any:
    """Call the adapters' `make`. The reference's also takes the stage."""
    takes_stage = "stage" in inspect.signature(adapters.make).parameters
    with engine_runs():
        engine = adapters.make(folder, limits, device, **({"stage": stage} if takes_stage else {}))
    if engine is None:
        raise Rejected("`make` in adapters.py returned None: it has to end in `return` and the engine")
    return engine


# -- to play ---------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Requests, what an engine may use, and what it did."""

    limits: Limits
    asks: Sequence[Ask]
    steps: list[Step] = field(default_factory=list)
    times: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each call of `step`, in seconds
    arrived: dict[str, float] = field(default_factory=dict)
    bytes_read: int = 0
    least_bytes: int = 0
    num_attended: int = 0
    idle: int = 0
    shifts: bool = False  # whether the harness adds something to what `attend` returns

    @property
    def computed(self) -> int:
        """Tokens that all steps computed."""
        return sum(n for step in self.steps for _, _, n in step.work)

    @property
    def counts(self) -> dict[str, int]:
        """What the score is made of."""
        held = (len({block for table in step.tables.values() for block in table}) for step in self.steps)
        return {
            "steps": sum(bool(step.work) for step in self.steps),
            "tokens computed": self.computed,
            "most blocks": max(held, default=0),
            "preemptions": sum(len(step.preempted) for step in self.steps),
            "bytes read": self.bytes_read,
            "idle": self.idle,
        }


class Stream(Device):
    """The given device. The harness can run something behind all that was launched, and counts as work what attends."""

    def __init__(self) -> None:
        super().__init__()
        self.attended: set[int] | None = None  # tickets whose work has called `attend`; None where nobody counts
        self._running = 0  # whose work runs
        self._left: list[list[int]] = []  # after each read, what was launched and had not run

    def launch(self, work: Callable[[], Any]) -> int:
        ticket = self._launched + 1

        def run() -> Any:
            self._running = ticket
            try:
                return work()
            finally:
                self._running = 0

        return super().launch(run)

    def read(self, ticket: int) -> Any:
        result = super().read(ticket)
        self._left.append([number for number, _ in self._queue])
        return result

    def note_attended(self) -> None:
        """Note that what runs attends. Raises `Rejected` where nothing runs: the host computes, and not the device."""
        if not self._running:
            raise Rejected("attend was called outside of the work that was launched: a step's model runs on the device")
        self.attended = (self.attended or set()) | {self._running}

    @property
    def num_idle(self) -> int:
        """How often a read left the device without any attention to compute."""
        attended = self.attended
        return self.idle if attended is None else sum(attended.isdisjoint(left) for left in self._left)

    def behind(self, work: Callable[[], object]) -> None:
        """Run `work` after what is queued last, now if nothing is."""
        if not self._queue:
            work()
            return
        ticket, last = self._queue.pop()
        self._queue.append((ticket, lambda: (last(), work())[0]))


@torch.inference_mode()
def play(adapters: ModuleType, folder: Path, trace: Trace, stage: int, *, is_checked: bool = True) -> Trace:
    """Serve a trace's requests, and add to it what happens: after an error it has the steps before. Returns it.

    `is_checked` off: no poison and no checks, to measure time.

    Raises:
        Rejected: the engine did something wrong. An error of the engine's own comes with a note.
    """
    device, ledger = Stream(), Ledger(trace.asks, trace.limits, stage)
    engine = make(adapters, folder, trace.limits, device, stage)
    cache = _cache_of(engine, trace.limits) if is_checked and stage >= 2 else None
    if cache is not None:
        cache.fill_(torch.nan)
        if stage >= 4:
            _count_reads(engine, trace, len(cache), device if stage == 6 else None)
    for step in _steps(engine, ledger, trace):
        ledger.check(step, cache if stage < 6 else None) if is_checked else ledger.update(step)
        if cache is not None:
            device.behind(_poison(cache, ledger.worthless_blocks()))
            for place in ledger.overwrites(step):
                device.behind(partial(_overwrite, cache, *place))
    trace.idle = device.num_idle
    return trace


def serve(engine: Any, requests: Sequence[tuple[Sequence[int], int]]) -> tuple[list[list[int]], list[Step]]:
    """Serve (prompt, tokens wanted) pairs that come at once. Returns the answers and all steps; checks no token and no block.

    Raises:
        Rejected: the engine returned no `Step`, or too many of them.
    """
    asks = [Ask(str(i), prompt, (0,) * max_tokens) for i, (prompt, max_tokens) in enumerate(requests)]
    limits = Limits(0, 0, 0, 0)  # not looked at in stage 0
    ledger, trace = Ledger(asks, limits, 0), Trace(limits, asks)
    for step in _steps(engine, ledger, trace):
        ledger.update(step)
    return [one.tokens[len(one.ask.prompt) :] for one in ledger.served.values()], trace.steps


def _steps(engine: Any, ledger: Ledger, trace: Trace) -> Iterator[Step]:
    """Hand in each request when it is due, and call `step` until all have their tokens.

    Yields each step, which is in the trace then; the ledger has to have it before the next.
    """
    waiting, now = sorted(trace.asks, key=lambda ask: ask.arrives), 0
    most = 100 + 10 * sum(ask.arrives + len(ask.prompt) + ask.max_tokens for ask in trace.asks)
    while waiting or not ledger.is_done:
        while waiting and waiting[0].arrives <= now:
            ask = waiting.pop(0)
            trace.arrived[ask.id] = time.perf_counter()
            with _in_engine(ledger):
                engine.add(ask.id, list(ask.prompt), ask.max_tokens)
            ledger.add(ask)
        if not ledger.is_done:
            with _in_engine(ledger):
                began = time.perf_counter()
                step = engine.step()
                ended = time.perf_counter()
            ledger.form(step)
            trace.times.append((began, ended))
            trace.steps.append(step)
            yield step
        if (now := now + 1) > most:
            raise Rejected(f"after {now} steps these still wait for tokens: {', '.join(ledger.unfinished)}")


@contextmanager
def _in_engine(ledger: Ledger) -> Iterator[None]:
    """While the engine's code runs: its files find each other, and an error of its own says in a note when it came."""
    try:
        with engine_runs():
            yield
    except Rejected as error:
        raise Rejected(f"step {ledger.number}: {error}") from error
    except Exception as error:
        error.add_note(f"mini: step {ledger.number} raised this; these wait for tokens: {', '.join(ledger.unfinished)}")
        raise


def _cache_of(engine: Any, limits: Limits) -> torch.Tensor:
    cache = getattr(engine, "cache", None)
    if not isinstance(cache, torch.Tensor) or cache.dim() != 6 or cache.shape[1:4] != (2, *limits[:2]):
        said = f"a tensor {list(cache.shape)}" if isinstance(cache, torch.Tensor) else f"a {type(cache).__name__}"
        wanted = f"[L, 2, {limits.num_blocks}, {limits.block_size}, Hkv, D]"
        raise Rejected(f"engine.cache is {said}; from stage 2 on all K and V are in a tensor {wanted}")
    return cache


def _poison(cache: torch.Tensor, blocks: list[int]) -> Callable[[], object]:
    """What makes blocks that nobody may read unreadable: a stale read gives NaN."""
    return lambda: cache.index_fill_(2, torch.tensor(blocks, dtype=torch.int64), torch.nan)


# -- to interfere ----------------------------------------------------------------------------------------------------


@cache
def other_values(num_layers: int, num_heads: int, dim: int, position: int) -> torch.Tensor:
    """What V of the token at this position is overwritten with: [L, Hkv, D]."""
    return 2 * torch.randn(num_layers, num_heads, dim, generator=torch.Generator().manual_seed(position))


@cache
def shifts(num_layers: int, num_heads: int, dim: int, length: int = 512) -> torch.Tensor:
    """What the harness adds to what `attend` returns, by layer and position: [L, length, Hq, D]. Of a position in three one layer has it."""
    found = torch.randn(num_layers, length, num_heads, dim, generator=torch.Generator().manual_seed(0))
    position, layer = torch.arange(length), torch.arange(num_layers)[:, None]
    chosen = (position % 3 == 1) & (position // 3 % num_layers == layer)  # [L, length]
    return 2 * found * chosen[..., None, None]


def _overwrite(kv: torch.Tensor, block: int, place: int, position: int) -> None:
    """Overwrite V of one token in all layers, and leave K alone, which may be kept before or after RoPE."""
    kv[:, 1, block, place] = other_values(len(kv), *kv.shape[4:], position)


# -- to count what attention reads -----------------------------------------------------------------------------------


class Tiles:
    """K or V [N, B, Hkv, D] of one layer, of which one block at a time fits into the memory for tiles.

    `tiles[b]` reads block b. The tile before it is gone then: it holds NaN.
    """

    def __init__(self, cache: torch.Tensor, read: Callable[[int], object]) -> None:
        self._cache, self._read, self._tile = cache, read, cache.new_empty(0)
        self.shape, self.dtype = cache.shape, cache.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        block, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(block, slice | list) or (isinstance(block, torch.Tensor) and block.dim()):
            raise Rejected("attend read several blocks at once: the memory for tiles holds one block of K and one of V")
        self._tile.fill_(torch.nan)
        self._tile = self._cache[int(block)].clone()
        self._read(self._tile.numel() * self._tile.element_size())
        return self._tile[tuple(rest)] if rest else self._tile


def _count_reads(engine: Any, trace: Trace, num_layers: int, device: Stream | None) -> None:
    """Replace `engine.attend` by one that counts, that hands out tiles, and that adds `shifts` where the trace asks for them."""
    attend = getattr(engine, "attend", None)
    if not callable(attend):
        raise Rejected("the engine has no `attend`: from stage 4 on it calls engine.attend for each layer and sequence")
    calls = Counter[tuple[int, ...]]()  # by sequence, as its blocks and its first position say

    def read(num_bytes: int) -> None:
        trace.bytes_read += num_bytes

    def counted(query: Any, keys: Any, values: Any, table: list[int], start: int) -> Any:
        if device:
            device.note_attended()
        trace.num_attended += 1
        num_blocks = -(-(start + len(query)) // keys.shape[1])
        trace.least_bytes += 2 * num_blocks * keys[0].numel() * keys.element_size()
        out = attend(query, Tiles(keys, read), Tiles(values, read), table, start)
        layer = calls[start, *table] % num_layers
        calls[start, *table] += 1
        if not trace.shifts:
            return out
        return out + shifts(num_layers, *query.shape[1:])[layer, start : start + len(query)]

    engine.attend = counted
