"""From events to what a server is told: tokens to whom they belong, and how busy the engine is, without asking it."""

from __future__ import annotations

from collections import defaultdict

import pytest

from folovllm.electives.server.aggregator import Aggregator
from folovllm.electives.server.messages import SchedulerStats
from folovllm.engine import events as ev
from folovllm.engine.llm_engine import LLMEngine
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams
from tests.m5.test_events import World, engine


class Mirror:
    """What a server would know, beside the engine's own word."""

    def __init__(self, served: LLMEngine, seed: int) -> None:
        self.world = World(served, seed)
        self.digest = Aggregator(bool(served.setup.config.enable_prefix_caching))
        self.tokens: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.ends: dict[tuple[int, int], str] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.queue_times: list[float] = []
        self.events: list[ev.Event] = []
        served.subscribe(self.events.extend)
        self.engine = served

    def turn(self) -> None:
        world = self.world
        alive = list(self.engine.core.output_processor.requests)
        if world.die.random() < 0.5 or not alive:
            params = SamplingParams(temperature=0, max_tokens=world.die.randint(1, 8), n=world.die.choice((1, 1, 2)))
            prompt = [world.die.choice((1, 1, 2)) for _ in range(world.die.choice((1, 8, 13, 20)))]
            self.engine.add_request(str(world.names), prompt, params, stream=False)
            world.names += 1
        elif world.die.random() < 0.1:
            self.engine.abort_request([world.die.choice(alive)])
        self.outputs |= {output.request_id: output for output in self.engine.step()}
        self.read()

    def read(self) -> None:
        self.step = self.digest.take(self.events, [])
        self.events.clear()
        self.queue_times += self.step.queue_times
        for delta in self.step.deltas:
            assert (delta.number, delta.index) not in self.ends, "news of an answer that is over"
            self.tokens[delta.number, delta.index] += delta.token_ids
            assert delta.token_ids, (
                "an end comes with its last tokens: none can be looked at and not be known to be the last"
            )
            if delta.finish_reason is not None:
                self.ends[delta.number, delta.index] = delta.finish_reason
        assert self.step.stats == self.expected()

    def expected(self) -> SchedulerStats:
        stats, cached = self.engine.stats(), self.engine.setup.config.enable_prefix_caching
        load, preempted = self.step.stats, sum(isinstance(event, ev.Preempted) for event in self.world.seen)
        assert load.prefix_tokens_hit <= load.prefix_tokens if cached else load.prefix_tokens == 0
        return SchedulerStats(
            stats.waiting, stats.running, stats.kv_blocks_used, stats.kv_blocks_total,
            preempted, load.prefix_tokens, load.prefix_tokens_hit,
        )  # fmt: skip


@pytest.mark.parametrize("milestone", ["m2", "m3", "m5", "m6"])
def test_the_digest_is_what_the_engine_would_say(milestone: str) -> None:
    """Tokens and ends are those of the finished outputs; the load is that of `stats()`, after each step."""
    for seed in range(3):
        mirror = Mirror(engine(milestone), seed)
        for _ in range(60):
            mirror.turn()
        for id_, output in mirror.outputs.items():
            for answer in output.outputs:
                key = int(id_), answer.index
                assert (mirror.tokens[key], mirror.ends[key]) == (answer.token_ids, answer.finish_reason)
        mirror.engine.abort_request(list(mirror.engine.core.output_processor.requests))
        mirror.engine.step()
        mirror.read()
        assert mirror.step.stats.num_running == mirror.step.stats.num_waiting == mirror.step.stats.kv_blocks_used == 0
        assert all(seconds >= 0 for seconds in mirror.queue_times)
        assert len(mirror.queue_times) >= len(mirror.outputs), "each that was let in has waited, if only a moment"
