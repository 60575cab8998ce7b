"""The electives: what turns each on, and what one may put in the place of the core's parts.

Here the core names an elective by a string; its module is imported when it is asked for. What lower layers ask for is in
`folovllm.electives`; elsewhere the core names none (`tests/project/test_floors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from folovllm.electives import is_installed, named, require

if TYPE_CHECKING:
    import typer
    from transformers import PreTrainedTokenizerBase

    from folovllm.attention.backends.abstract import AttentionBackend
    from folovllm.config import EngineConfig
    from folovllm.engine.logits_mask import LogitsMask
    from folovllm.engine.scheduler import Scheduler
    from folovllm.executor.abstract import Executor
    from folovllm.faults import Faults
    from folovllm.layers.layer_set import LayerSet
    from folovllm.setup import EngineSetup
    from folovllm.worker.graph_runner import GraphRunner
    from folovllm.worker.model_runner import ModelRunner

    MakeScheduler = Callable[..., Scheduler]
    MakeGraphRunner = Callable[..., GraphRunner]

# name: (where its `Extension` is, what turns it on)
EXTENSIONS: dict[str, tuple[str, Callable[[EngineConfig], bool]]] = {
    "speculative decoding (X3)": (
        "folovllm.spec_decode.extension:SpeculativeDecoding",
        lambda config: config.speculative_config is not None,
    ),
    "batch_invariant (X6)": (
        "folovllm.rollouts.extension:BatchInvariance",
        lambda config: config.batch_invariant,
    ),
}
LOGITS_MASK = (
    "folovllm.structured_output.manager:StructuredOutputManager"  # structured output (X1): any request may ask for it
)

# Modules with commands: each has `add_to(app)`.
COMMANDS = (
    "folovllm.server.cli",
    "folovllm.inspector.cli",
    "folovllm.quantization.quantizer.cli",
    "folovllm.rollouts.cli",
    "folovllm.bench.cli",
)


@dataclass(slots=True, frozen=True)
class EngineRoute:
    """An address of a server that calls a function of an elective beside the engine, which need not be in the server's process.

    The function at `place` gets the engine and the query of the address, and returns what JSON can say, or None for an empty
    response. Its ValueError is the client's mistake.
    """

    path: str
    method: str  # "GET" or "POST"
    place: str  # "module:function"


class Extension:
    """What an elective changes in an engine. Each method is a hook; here it returns what the core has without electives.

    An engine has one extension. The driver calls `prepare`, then `model_runner`, `attention_backend`, `layer_set` and, for packed steps,
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

    def scheduler(self, usual: MakeScheduler, executor: Executor, logits_mask: LogitsMask) -> MakeScheduler:
        """Return what makes the scheduler. The executor is there by now, and may be measured."""
        return usual

    def close(self) -> None:
        """Give back what `prepare` made."""


def extension_of(setup: EngineSetup) -> Extension:
    """The extension that the configuration asks for, or one that changes nothing. Raises ValueError if it asks for two."""
    asked = {name: place for name, (place, asks) in EXTENSIONS.items() if asks(setup.config)}
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} do not work together: choose one of them")
    found: Extension = require(*asked.values(), *asked)(setup) if asked else Extension(setup)
    return found


class DeferredMask:
    """A `LogitsMask` that allows all until a request asks for structured output; from then on it is the one that `make` returns."""

    def __init__(self, all_allowed: LogitsMask, make: Callable[[], LogitsMask]) -> None:
        self._mask = all_allowed
        self._make = cache(make)

    def add(self, seqs: Sequence[Any]) -> None:
        """Begin with the sequences of a new request."""
        if seqs[0].params.structured_outputs is not None:
            self._mask = self._make()
            self._mask.add(seqs)

    def prepare(self, model_end_ids: Collection[int]) -> None:
        """Do now what the first request would wait for."""
        self._mask = self._make()
        self._mask.prepare(model_end_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mask, name)


def make_logits_mask(tokenizer: PreTrainedTokenizerBase, vocab_size: int, faults: Faults) -> LogitsMask:
    """The mask of structured output (X1), imported with the first request for it."""
    from folovllm.engine.logits_mask import LogitsMask

    def make() -> LogitsMask:
        return named(LOGITS_MASK)(tokenizer, vocab_size) if is_installed(LOGITS_MASK) else LogitsMask()

    return cast("LogitsMask", DeferredMask(LogitsMask(), make))


def add_commands(app: typer.Typer) -> None:
    """Add the commands of the packages that are installed."""
    for module in filter(is_installed, COMMANDS):
        named(module).add_to(app)
