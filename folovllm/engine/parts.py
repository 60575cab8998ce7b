"""What an engine consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from folovllm.engine.input_processor import InputProcessor
from folovllm.engine.logits_mask import LogitsMask
from folovllm.engine.scheduler import SchedulerLike
from folovllm.events import Events
from folovllm.executor.abstract import Executor
from folovllm.faults import Faults
from folovllm.setup import EngineSetup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from folovllm.extensions import Extension


@dataclass(slots=True, frozen=True)
class Parts:
    """The parts of an engine. `folovllm.build` decides which class stands in each place."""

    setup: EngineSetup
    num_threads: int | None
    tokenizer: PreTrainedTokenizerBase
    processor: InputProcessor
    executor: Executor
    scheduler: SchedulerLike
    events: Events
    faults: Faults
    logits_mask: LogitsMask
    extension: Extension
