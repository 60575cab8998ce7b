"""Who listens to the events of an engine with drafts knows what its parts know; and what a configuration may say."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest

from folovllm.apps.cli.show import step_line
from folovllm.apps.inspector import lines
from folovllm.apps.inspector.lines import Recording, Turn
from folovllm.apps.inspector.trace import REQUESTS, Trace
from folovllm.config import EngineConfig
from folovllm.electives.server.aggregator import Aggregator
from folovllm.electives.spec_decode.config import SpeculativeConfig
from folovllm.electives.spec_decode.policy import LengthPolicy
from folovllm.engine.events import DraftsVerified, Event, StepBegan, StepEnded
from folovllm.step.schedule import SchedulerOutput, StepResult
from tests.inspector.test_recording import Taped, assert_replays
from tests.m5.test_events import NoDevice, engine
from tests.x3.engines import Anything, speculation_of, speculative


class NoJudge(NoDevice):
    """Drafts at random, as many tokens as another one says."""

    def execute_model(self, output: SchedulerOutput) -> StepResult:
        whole = super().execute_model(output)
        pairs = zip(whole.token_ids, output.scheduled_seqs, strict=True)
        return StepResult([tokens[: self.die.randint(1, max(1, s.num_samples))] for tokens, s in pairs], {})


def rejected_of(seen: list[Event]) -> Iterator[list[int]]:
    """The drafts of each check that were wrong, from what the steps were asked to compute."""
    asked: dict[int, list[int]] = {}
    for event in seen:
        if isinstance(event, StepBegan):
            asked |= {
                scheduled.seq_id: scheduled.token_ids[1:].tolist()
                for scheduled in event.output.scheduled_seqs
                if scheduled.num_samples > 1
            }
        elif isinstance(event, DraftsVerified):
            yield asked[event.seq_id][event.num_accepted :]


@pytest.mark.parametrize("milestone", ["m2", "m3", "m5", "m6"])
def test_watcher_recording_digest_and_log(milestone: str) -> None:
    served = engine(milestone, **speculative(Anything(), k=5))
    taped = Taped(served, seed=7)
    served.core.executor = NoJudge(served.executor.num_kv_blocks, taped.die)
    served.history = []
    traced = Trace()
    served.subscribe(traced)
    for _ in range(60):
        taped.turn()
    made, aggregator = speculation_of(served), Aggregator(has_prefix_cache=True)
    assert made.num_draft_tokens > made.num_accepted > 0
    checks = [event for event in taped.seen if isinstance(event, DraftsVerified)]
    assert made.num_drafts == len(checks)
    assert made.num_draft_tokens == sum(event.num_draft_tokens for event in checks)
    assert made.num_accepted == sum(event.num_accepted for event in checks)
    for event in checks:
        stats = aggregator.take([event], []).stats
    assert (stats.num_drafts, stats.num_draft_tokens) == (made.num_drafts, made.num_draft_tokens)
    assert sum(step.num_draft_tokens for step in served.history) == made.num_draft_tokens
    told = [step_line(step) for step in served.history if step.num_draft_tokens]
    assert told and all("   draft tokens accepted " in line for line in told)
    found: Recording = assert_replays(taped)
    entries = [entry for line in found.lines if isinstance(line, Turn) for entry in line.events]
    kinds = {type(entry).__name__ for entry in entries}
    rejected = [entry.rejected for entry in entries if isinstance(entry, lines.DraftsVerified)]
    assert rejected == list(rejected_of(taped.seen)), "the wrong ones, by name"
    spans = Counter(span["name"] for span in traced.events() if span["pid"] == REQUESTS and span["ph"] == "X")
    shares = [s for event in taped.seen if isinstance(event, StepEnded) for s in event.output.scheduled_seqs]
    assert sum(spans[f"verify {k}"] for k in range(1, 6)) == sum(share.num_samples > 1 for share in shares)
    assert kinds >= {"DraftsVerified", "TableCut"} - ({"TableCut"} if milestone == "m2" else set())


CONFIG = SpeculativeConfig(num_speculative_tokens=6)


@pytest.mark.parametrize(("given", "whole"), [
    ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 4}},
     SpeculativeConfig("ngram", 6, 4)),
    ({"speculative_config": '{"model": "[ngram]", "num_speculative_tokens": 6}'}, CONFIG),
    ({"speculative_config": {"model": "small", "num_speculative_tokens": 6}}, SpeculativeConfig("draft_model", 6, model="small")),
    ({"speculative_method": "ngram", "num_speculative_tokens": 6}, CONFIG),
    ({"speculative_method": "ngram+suffix"}, SpeculativeConfig("ngram+suffix")),
    ({"speculative_config": CONFIG, "num_speculative_tokens": 2}, SpeculativeConfig(num_speculative_tokens=2)),
    ({"speculative_config": None}, None),
])  # fmt: skip
def test_a_configuration_says_the_same_in_several_ways(given: dict[str, Any], whole: SpeculativeConfig | None) -> None:
    config = EngineConfig(**given)
    assert config.speculative_config == whole
    again = EngineConfig(**{field.name: getattr(config, field.name) for field in fields(config)})
    assert again.speculative_config == whole, "what was resolved can be said again"


@pytest.mark.parametrize(("given", "says"), [
    ({"speculative_config": {"method": "medusa"}}, "choose one of ngram, suffix, draft_model"),
    ({"speculative_config": {"method": "ngram", "heads": 3}}, "not heads: leave it out"),
    ({"speculative_config": "ngram"}, "is no JSON"),
    ({"speculative_config": 3}, "must be a dict, not 3"),
    ({"speculative_method": "ngram", "num_speculative_tokens": 0}, "must be at least 1"),
    ({"speculative_method": "ngram", "num_speculative_tokens": True}, "a whole number"),
    ({"num_speculative_tokens": 3}, "needs a speculative_method"),
    ({"speculative_method": "draft_model"}, "needs a model"),
    ({"speculative_config": {"method": Anything}}, "an object, not its class"),
    ({"speculative_method": 5}, "must be a name or a Proposer"),
    ({"speculative_config": {1: 2, "x": 3}}, "not 1, x"),
    ({"speculative_config": {"method": "suffix", "model": "small"}}, "no other method takes one"),
    ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 7}}, "is above prompt_lookup_max 5: lower it"),
    ({"speculative_method": "ngram", "milestone": "m1"}, "take milestone m2 or later"),
    ({"speculative_method": "ngram", "milestone": "m2", "builders": "scheduler"}, "the engine's own scheduler"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_a_sentence(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(**given)


def test_ranks_with_schedulers_of_their_own_do_not_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun all must decide the same."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    served = engine("m5", speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    assert type(speculation_of(served).policy) is LengthPolicy
