"""A, B and C: the three requests that chapters 1 to 6 and their notebooks follow through every milestone.

`running_example.json` holds the requests with their tokens, and what each preset is given beside its own choices: a memory
of 40 tokens, so small that it runs out. `play` puts them through the real engine and returns what happened, step by step:

    from milestones.running_example import play
    run = play("m3")
    run.turns[4].preempted          # ("C",)
    run.turns[4].after.memory       # which token of whom lies in which slot

Everything in a `Turn` comes from the engine's events; `milestones.pictures` draws it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from folovllm.engine.events import Event
    from folovllm.engine.llm_engine import LLMEngine

FILE = Path(__file__).with_suffix(".json")
Place = tuple[str, int]  # whose token, and at which position


@dataclass(frozen=True, slots=True)
class Request:
    """One of A, B and C."""

    name: str
    turn: int  # the call of `step` before which it arrives
    prompt: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    answer: str  # greedy; the same in every milestone
    answer_token_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt_token_ids + self.answer_token_ids


@dataclass(frozen=True, slots=True)
class Example:
    """The three requests, and what each preset is given beside its own choices."""

    model: str
    requests: tuple[Request, ...]
    texts: dict[int, str]  # of every token id that occurs
    engine: dict[str, dict[str, int]]  # by milestone: fields of `EngineConfig`

    def request(self, name: str) -> Request:
        """A, B or C. Raises KeyError for others."""
        return {request.name: request for request in self.requests}[name]


@cache
def example() -> Example:
    """What the file says."""
    stored = json.loads(FILE.read_text("utf-8"))
    requests: list[dict[str, Any]] = stored["requests"]
    for request in requests:
        request |= {key: tuple(value) for key, value in request.items() if isinstance(value, list)}
    texts = {int(token): text for token, text in stored["texts"].items()}
    return Example(stored["model"], tuple(Request(**request) for request in requests), texts, stored["engine"])


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """What a step computes of one request: its tokens `start` to `end`."""

    name: str
    start: int
    end: int
    token_ids: tuple[int, ...]  # as the scheduler knows them: none of a token that is still on the device (M6)
    slots: tuple[int, ...]  # where their K/V goes: the slot mapping; () without a pool of blocks (M1)
    draws: bool  # whether it reaches the last token, so that the next one is drawn


@dataclass(frozen=True, slots=True)
class State:
    """How things stand between two steps."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    tables: dict[str, tuple[int, ...]]  # of those that run: numbers of blocks
    held: tuple[int, ...]  # [N] for each block, how many hold it; () without a pool of blocks (M1)
    named: tuple[bool, ...]  # [N] whether the prefix cache can find it (M5)
    memory: tuple[Place | None, ...]  # [N * B] what was written last into each slot, also after its block is free


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of `LLMEngine.step`. With overlap (M6) it begins one step and takes in the tokens of the one before."""

    number: int
    arrived: tuple[str, ...]
    before: State
    after: State
    scheduled_seqs: tuple[ScheduledSequence, ...]
    drawn: dict[str, int]  # whose next token came, and its id
    refused: dict[str, str]  # who had to wait, and for want of what: "sequences", "tokens", "blocks" or "preemption"
    preempted: dict[str, str]  # who gave way, and for whom
    lost: dict[str, int]  # computed tokens that went with it
    hits: dict[str, int]  # tokens that the prefix cache had of those that came in
    finished: tuple[str, ...]
    outside: tuple[str, ...] = ()  # with static batching: who came, and is kept from the engine


@dataclass(frozen=True, slots=True)
class Run:
    """A, B and C in one milestone."""

    milestone: str
    block_size: int
    turns: tuple[Turn, ...]
    answers: dict[str, tuple[int, ...]]
    texts: dict[int, str]  # of every token id that occurs, also where wrong code drew it

    def text(self, name: str, position: int) -> str:
        """A token of a request, prompt or answer, as text."""
        return self.texts[(example().request(name).prompt_token_ids + self.answers[name])[position]]


def engine_for(milestone: str, **overrides: Any) -> LLMEngine:
    """An engine as the example sets it up. `overrides` are fields of `EngineConfig`."""
    from folovllm.config import EngineConfig
    from folovllm.engine.llm_engine import make_engine

    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "use_tqdm": False} | example().engine[milestone]
    return make_engine(EngineConfig(model=example().model, milestone=milestone, **options | overrides))


def play(
    milestone: str,
    *,
    static: bool = False,
    around: Callable[[LLMEngine], AbstractContextManager[object]] = lambda engine: nullcontext(),
    **overrides: Any,
) -> Run:
    """Put A, B and C through the engine.

    Args:
        milestone: whose preset.
        static: a request that comes while others are served waits until all of them are done (static batching).
        around: a context in which the requests are played: a film, a recorder, a clock.
        overrides: fields of `EngineConfig`.
    """
    with closing(engine_for(milestone, **overrides)) as engine, around(engine):
        return _play(engine, milestone, static)


def _play(engine: LLMEngine, milestone: str, static: bool) -> Run:
    from folovllm.sampling_params import SamplingParams

    observer = Observer(engine)
    engine.subscribe(observer)
    todo, turns, answers = list(example().requests), list[Turn](), dict[str, tuple[int, ...]]()
    while todo or engine.has_unfinished_requests():
        due = [request for request in todo if request.turn <= len(turns)]
        if not (static and engine.has_unfinished_requests()):
            for request in due:
                params = SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
                engine.add_request(request.name, list(request.prompt_token_ids), params, stream=False)
                todo.remove(request)
            due = []
        answers |= {output.request_id: tuple(output.outputs[0].token_ids) for output in engine.step()}
        turns.append(observer.turn(len(turns), tuple(request.name for request in due)))
    engine.unsubscribe(observer)
    seen = {token for request in example().requests for token in request.prompt_token_ids + answers[request.name]}
    seen |= {token for turn in turns for token in turn.drawn.values()}
    texts = {token: engine.tokenizer.decode([token]) for token in seen}
    return Run(milestone, observer.block_size, tuple(turns), answers, texts)


class Observer:
    """A listener that makes a `Turn` of the events of each step."""

    def __init__(self, engine: LLMEngine) -> None:
        from folovllm.apps.inspector.watcher import Watcher
        from folovllm.engine.build_batch import cache_manager

        self._watcher, self._slots = Watcher(), cache_manager(engine.setup.config).slots
        self._events: list[Event] = []
        self._memory: list[Place | None] = []
        self._names: dict[int, str] = {}

    def __call__(self, events: Sequence[Event]) -> None:
        """Keep what happened."""
        self._events += events

    @property
    def block_size(self) -> int:
        """Tokens a block holds."""
        return self._watcher.block_size

    def turn(self, number: int, outside: tuple[str, ...]) -> Turn:
        """What happened since the last call; who is kept outside, it cannot see."""
        from folovllm.engine import events as ev

        events: list[Any] = self._events
        self._events, added = [], [event for event in events if isinstance(event, ev.RequestAdded)]
        self._names |= {event.seq_id: event.request_id for event in added}
        self._watcher([event for event in events if isinstance(event, ev.Snapshot | ev.RequestAdded)])
        self._memory = self._memory or [None] * (len(self._watcher.cells) * self.block_size)
        before, scheduled_seqs, drawn = self._state(), tuple[ScheduledSequence, ...](), dict[str, int]()
        for event in (event for event in events if not isinstance(event, ev.Snapshot | ev.RequestAdded)):
            self._watcher([event])
            if isinstance(event, ev.StepBegan):
                scheduled_seqs = tuple(map(self._scheduled, event.output.scheduled_seqs))
            if isinstance(event, ev.StepEnded):
                pairs = zip(event.output.scheduled_seqs, event.result.token_ids, strict=True)
                drawn = {self._names[scheduled.seq_id]: ids[0] for scheduled, ids in pairs if ids}

        def named(kind: Any) -> dict[str, Any]:
            return {self._names[event.seq_id]: event for event in events if isinstance(event, kind)}

        return Turn(
            number=number,
            arrived=tuple(event.request_id for event in added),
            before=before,
            after=self._state(),
            scheduled_seqs=scheduled_seqs,
            drawn=drawn,
            refused={name: event.budget for name, event in named(ev.Refused).items()},
            preempted={name: self._names[event.for_seq_id] for name, event in named(ev.Preempted).items()},
            lost={name: event.num_tokens for name, event in named(ev.Preempted).items()},
            hits={name: event.num_tokens for name, event in named(ev.PrefixHit).items()},
            finished=tuple(named(ev.Finished)),
            outside=outside,
        )

    def _scheduled(self, one: Any) -> ScheduledSequence:
        """What a step that begins computes of a request; its tokens are in memory then."""
        name, table = self._names[one.seq_id], self._watcher.sequences[one.seq_id].block_table
        slots = self._slots(table, self.block_size, one.start, one.end).tolist() if self._memory else []
        for position, slot in enumerate(slots, one.start):
            self._memory[slot] = (name, position)
        return ScheduledSequence(
            name, one.start, one.end, tuple(map(int, one.token_ids)), tuple(slots), bool(one.num_samples)
        )

    def _state(self) -> State:
        sequences, cells = self._watcher.sequences.values(), self._watcher.cells
        return State(
            waiting=tuple(seq.request_id for seq in sequences if not seq.is_running),
            running=tuple(seq.request_id for seq in sequences if seq.is_running),
            tables={seq.request_id: tuple(seq.block_table) for seq in sequences if seq.is_running},
            held=tuple(cell.ref_count for cell in cells),
            named=tuple(cell.hash is not None for cell in cells),
            memory=tuple(self._memory),
        )
