"""The stream of events: what a listener makes of it is what the engine's parts say themselves, and it is free where nobody listens."""

import inspect
import random
import sys
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from folovllm.apps.inspector.watcher import Cell, Watcher
from folovllm.cache.block_manager import BlockManager
from folovllm.config import EngineConfig
from folovllm.engine import events as ev
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.engine.metrics import StepLog
from folovllm.engine.scheduler import Scheduler
from folovllm.request import SequenceStatus
from folovllm.sampling_params import SamplingParams
from folovllm.step.schedule import NothingScheduled, SchedulerOutput, StepResult
from tests.helpers import tiny_checkpoint

RECORDS = [kind for _, kind in inspect.getmembers(ev, inspect.isclass) if issubclass(kind, ev.Tagged)]
# No events, or of drafts, windows, experts, states and offloading.
OTHERS = (ev.Tagged, ev.TableCut, ev.DraftsVerified, ev.BlockPassed, ev.ExpertsAsked, ev.GivenUp)
OTHERS += (ev.SnapshotCached, ev.SnapshotEvicted, ev.BlocksMoved)
TIGHT = {"block_size": 4, "num_kv_blocks": 12, "max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 32}

EVERY = ["m1", "m2", "m5", pytest.param("m6", marks=pytest.mark.m6)]


def engine(milestone: str = "m5", **overrides: Any) -> LLMEngine:
    fields = TIGHT | ({"block_size": None, "num_kv_blocks": 3} if milestone == "m2" else {})
    fields |= {} if milestone in ("m5", "m6") else {"max_num_batched_tokens": 32}  # whole prompts
    fields |= {"block_size": None, "num_kv_blocks": None, "max_num_seqs": 1} if milestone == "m1" else {}
    options = {"milestone": milestone, "device": "cpu", "use_tqdm": False} | fields | overrides
    return make_engine(EngineConfig(model=str(tiny_checkpoint()), **options))


class NoDevice:
    """An executor that draws from a die: the scheduler and the cache are real, and steps cost nothing."""

    def __init__(self, num_kv_blocks: int, die: random.Random) -> None:
        self.num_kv_blocks, self.die = num_kv_blocks, die

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        if not output.scheduled_seqs:
            raise NothingScheduled
        tokens = [[self.die.randrange(3)] * scheduled.num_samples for scheduled in output.scheduled_seqs]
        return StepResult(tokens, {})

    def submit(self, output: SchedulerOutput) -> Any:
        result = self.execute_model(output)

        class Pending:
            @staticmethod
            def wait() -> StepResult:
                return result

        return Pending()


class World:
    """An engine without a device, random requests, and after each step the comparison."""

    def __init__(self, served: LLMEngine, seed: int) -> None:
        self.engine, self.die = served, random.Random(seed)
        self.engine.core.executor = NoDevice(served.executor.num_kv_blocks, self.die)
        self.watcher, self.seen, self.names = Watcher(), list[ev.Event](), 0
        served.subscribe(self.watcher)
        served.subscribe(self.seen.extend)

    def turn(self) -> None:
        """Perhaps a request comes, perhaps one is aborted, perhaps the prefixes are forgotten; then a step."""
        alive = list(self.engine.core.output_processor.requests)
        if self.die.random() < 0.5 or not alive:
            self.add()
        if alive and self.die.random() < 0.08:
            self.engine.abort_request(self.die.choice(alive))
            self.compare()
        if self.engine.setup.config.enable_prefix_caching and self.die.random() < 0.02:
            self.engine.reset_prefix_cache()
            self.compare()
        self.engine.step()
        self.compare()

    def add(self) -> None:
        """Prompts over few tokens, many of them beginnings of others; one of 32 positions is left for the answer at least."""
        length = self.die.choice((1, 3, 8, 9, 13, 20, 24))
        prompt = [self.die.choice((1, 1, 1, 2)) if i % 8 == 0 else 1 for i in range(length)]
        params = SamplingParams(temperature=0, max_tokens=self.die.randint(1, 8), n=self.die.choice((1, 1, 2)))
        self.engine.add_request(f"r{self.names}", prompt, params, stream=False)
        self.names += 1

    def compare(self) -> None:
        """The reducer's state is the scheduler's and the cache manager's own."""
        scheduler, watcher = self.engine.scheduler, self.watcher
        own = {seq.seq_id: seq for seq in (*scheduler.running, *scheduler.waiting)}
        assert own.keys() == watcher.sequences.keys(), "who is served"
        for seq_id, seq in watcher.sequences.items():
            assert seq.is_running == (own[seq_id].status is SequenceStatus.RUNNING)
            assert seq.num_computed_tokens == own[seq_id].num_computed_tokens
            assert seq.num_tokens == own[seq_id].num_tokens
            assert seq.block_table == own[seq_id].block_table, "who holds which block"
        if isinstance(scheduler, Scheduler):
            assert watcher.cells == cells_of(scheduler.kv)


def cells_of(kv: Any) -> list[Cell]:
    """The blocks as their manager has them."""
    if isinstance(kv, BlockManager):
        return [Cell(b.ref_count, b in {*kv._free}, b.hash, b.serial, b.parent) for b in kv.blocks]
    return [Cell(int(i not in kv._free), i in kv._free) for i in range(kv.num_blocks)]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, LLMEngine]]:
    """One engine a milestone, made when it is asked for; examples follow one another on it: the cache of one is the past of the next."""
    yield (made := {})
    for served in made.values():
        served.executor.shutdown = lambda: None


@pytest.mark.parametrize("milestone", ["m3", *EVERY])
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_the_watcher_says_what_the_parts_say(engines: dict[str, LLMEngine], milestone: str, seed: int) -> None:
    """Through prefix hits, chunks, preemptions, refusals, aborts and evictions; at every step. Who begins late sees the same."""
    if milestone not in engines:
        engines[milestone] = engine(milestone)
    world = World(engines[milestone], seed)
    try:
        for turn in range(40):
            world.turn()
            if turn == 20:  # requests run, blocks are cached, and with overlap a step is in flight
                world.engine.unsubscribe(world.watcher)
                world.watcher = Watcher()
                world.engine.subscribe(world.watcher)
                world.compare()
    finally:
        world.engine.abort_request(list(world.engine.core.output_processor.requests))
        world.engine.step()  # takes in what is in flight
        world.compare()
        for listener in [*world.engine.events._listeners]:
            world.engine.unsubscribe(listener)
    assert not world.engine.events.on and not world.watcher.sequences


@pytest.mark.parametrize("milestone", EVERY[-2:])
def test_all_that_can_happen_is_told(milestone: str) -> None:
    """Beside the comparison: what no state shows. Each kind of event comes, and says what it should."""
    world = World(engine(milestone), 1)
    for _ in range(300):
        world.turn()
    seen: dict[type, list[Any]] = {kind: [e for e in world.seen if type(e) is kind] for kind in RECORDS}
    assert all(seen[kind] for kind in RECORDS if kind not in OTHERS)
    began, ended = seen[ev.StepBegan], seen[ev.StepEnded]
    assert [e.step for e in began[: len(ended)]] == [e.step for e in ended] == list(range(len(ended)))
    assert all(a.output is b.output for a, b in zip(began, ended, strict=False)), "the same step"
    assert all(e.start <= e.scheduled for e in began) and all(e.start <= e.arrived <= e.end for e in ended)
    assert {e.budget for e in seen[ev.Refused]} >= {"sequences", "blocks", "preemption"}
    assert all(e.budget_left + e.output.num_tokens == 24 for e in began)
    assert all(e.seq_id >= e.for_seq_id and e.num_tokens >= 0 for e in seen[ev.Preempted]), "who came later gives way"
    assert {e.reason for e in seen[ev.Finished]} <= {"stop", "length"}
    assert len(seen[ev.Aborted]) + len(seen[ev.Finished]) + len(world.watcher.sequences) == len(seen[ev.RequestAdded])


def told(served: LLMEngine) -> list[ev.Event]:
    seen: list[ev.Event] = []
    served.subscribe(seen.extend)
    seen.clear()  # how things stood
    return seen


def of(seen: SequenceOf[ev.Event], *kinds: type) -> list[Any]:
    return [event for event in seen if isinstance(event, kinds)]


GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(("budget", "options"), [
    ("sequences", {"max_num_seqs": 1}),
    ("tokens", {}),
    ("blocks", {"num_kv_blocks": 8, "max_num_batched_tokens": 64}),
])  # fmt: skip
def test_which_budget_refused(budget: str, options: dict[str, Any]) -> None:
    served = engine("m3", **options)
    seen = told(served)
    for name, first in zip("ab", (1, 2), strict=True):
        served.add_request(name, [first] * 20, GREEDY)
    served.step()
    second = of(seen, ev.RequestAdded)[1].seq_id
    assert of(seen, ev.Refused) == [ev.Refused(second, budget)]
    assert [event.num_cached_tokens for event in of(seen, ev.Admitted)] == [0]


def test_who_gave_way_for_whom_and_what_is_lost() -> None:
    served = engine("m3", num_kv_blocks=8)
    seen = told(served)
    for name, first in zip("ab", (1, 2), strict=True):
        served.add_request(name, [first] * 15, GREEDY)  # four blocks each: all eight
    for _ in range(3):
        served.step()
    first, second = (event.seq_id for event in of(seen, ev.RequestAdded))
    assert of(seen, ev.Preempted) == [ev.Preempted(second, first, 16)]
    assert ev.Refused(second, "preemption") in seen
    (freed,) = of(seen, ev.TableFreed)
    assert freed.seq_id == second and [left for _, left in freed.blocks] == [0] * 4
    assert [event.block_id for event in of(seen, ev.BlockFreed)] == [block for block, _ in reversed(freed.blocks)]


def test_a_prefix_is_published_found_and_forgotten() -> None:
    served = engine("m5")
    seen = told(served)
    served.generate([list(range(9)), [*range(8), 99]], GREEDY)
    published = of(seen, ev.BlockCached)
    assert [(event.place, event.parent) for event in published[:2]] == [(0, 0), (1, published[0].serial)]
    second = of(seen, ev.RequestAdded)[1].seq_id
    adopted = [(event.block_id, event.seq_id, event.ref_count) for event in of(seen, ev.BlockAdopted)]
    assert adopted == [(event.block_id, second, 2) for event in published[:2]], "the first one holds them too"
    assert of(seen, ev.PrefixHit) == [ev.PrefixHit(second, 8)] and not of(seen, ev.BlockEvicted)
    served.reset_prefix_cache()
    assert {e.hash for e in of(seen, ev.BlockEvicted)} == {e.hash for e in of(seen, ev.BlockCached)}


@pytest.mark.parametrize("milestone", EVERY)
def test_where_nobody_listens_no_event_is_made(milestone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(engine(milestone), 4)
    listeners = [*world.engine.events._listeners]
    for listener in listeners:
        world.engine.unsubscribe(listener)
    monkeypatch.setattr(world, "compare", lambda: None)

    def made(*_: Any, **__: Any) -> Any:
        raise AssertionError("nobody listens")

    modules = [module for name, module in sys.modules.items() if name.startswith("folovllm.")]
    names = [
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type) and value in RECORDS
    ]
    with monkeypatch.context() as patch:
        for module, name in names:
            patch.setattr(module, name, made)
        for _ in range(60):
            world.turn()
    world.engine.subscribe(world.seen.extend)
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="nobody listens"):
        for module, name in names:
            patch.setattr(module, name, made)
        world.turn()


@pytest.mark.parametrize("milestone", EVERY)
def test_the_log_of_steps_knows_whose_a_share_is_and_forgets_who_has_gone(milestone: str) -> None:
    """With overlap a share comes after its sequence has ended: it still has a name."""
    world, log = World(engine(milestone), 6), StepLog()
    world.engine.subscribe(log)
    for _ in range(60):
        world.turn()
    ended = [event for event in world.seen if isinstance(event, ev.StepEnded)]
    assert [len(step.scheduled_seqs) for step in log.steps] == [len(event.output.scheduled_seqs) for event in ended]
    world.engine.abort_request(list(world.engine.core.output_processor.requests))
    world.engine.step()
    world.add()
    world.engine.step()
    world.engine.step()
    assert len(log._added) <= 2, "prompts of requests that ended long ago are kept"
