"""What an elective may put in the place of an engine's parts. Which elective does, `folovllm.plugins` says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from folovllm.plugins import EXTENSIONS, load_elective

if TYPE_CHECKING:
    from folovllm.attention.backends.abstract import AttentionBackend
    from folovllm.engine.scheduler import Scheduler
    from folovllm.engine.setup import EngineSetup
    from folovllm.executor.abstract import Executor
    from folovllm.layers.layer_set import LayerSet
    from folovllm.worker.graph_runner import GraphRunner
    from folovllm.worker.model_runner import ModelRunner

    MakeScheduler = Callable[..., Scheduler]
    MakeGraphRunner = Callable[..., GraphRunner]


class Extension:
    """What an elective changes in an engine. Each method is a hook; here it returns what the core has without electives.

    An engine has one extension at most. The driver calls `prepare`, then `model_runner`, `attention_backend`, `layer_set` and, for packed steps,
    `num_samples` and `graph_runner` as it makes the worker, then `scheduler`, and at the end `close`. Each rank of several makes an extension
    of its own from its copy of the setup and never calls `prepare`, `scheduler` or `close`. What a hook returns is called
    as the core's own part is (`folovllm.build`). M1's runners and a learner's own components ask no hook.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup

    def prepare(self) -> None:
        """Make what needs memory of its own on the device: the executor, which comes next, takes all that is left."""

    def num_samples(self) -> int:
        """The most tokens that a step samples: one for each row. An extension whose runner samples more overrides this."""
        return self.setup.max_num_seqs

    def attention_backend(self, usual: Callable[[], AttentionBackend]) -> AttentionBackend:
        """Return the attention backend. `usual` makes the one that the configuration names."""
        return usual()

    def layer_set(self, usual: Callable[[], LayerSet]) -> LayerSet:
        """Return what the model is built from. `usual` makes the core's set for this device."""
        return usual()

    def model_runner(self, usual: type[ModelRunner]) -> type[ModelRunner]:
        """Return the runner of a step (M2)."""
        return usual

    def graph_runner(self, usual: MakeGraphRunner) -> MakeGraphRunner:
        """Return what makes the runner of a packed step (M6)."""
        return usual

    def scheduler(self, usual: MakeScheduler, executor: Executor) -> MakeScheduler:
        """Return what makes the scheduler. The executor is there by now, and may be measured."""
        return usual

    def limit_drafts(self, rules: Any) -> None:
        """Hear of structured output's manager, when it is made: it knows which draft tokens are allowed, and which are certain."""

    def close(self) -> None:
        """Give back what `prepare` made."""


def extension_of(setup: EngineSetup) -> Extension | None:
    """The extension that the configuration asks for; None if it asks for none. Raises ValueError if it asks for two."""
    make = asked_for(EXTENSIONS, setup)
    return None if make is None else make(setup)


def asked_for(table: dict[str, str], setup: EngineSetup) -> Callable[..., Any] | None:
    """What the configuration asks for of a table of `plugins`, if anything. Raises ValueError if it asks for two."""
    asked = [option for option in table if option in setup.config.extras]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} do not work together: choose one of them")
    return load_elective(table[asked[0]], asked[0]) if asked else None
