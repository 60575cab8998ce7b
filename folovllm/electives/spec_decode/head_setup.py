"""Which draft head runs beside a model, and where its weights are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from folovllm.electives.spec_decode.config import SpeculativeConfig
from folovllm.electives.spec_decode.eagle3 import Eagle3Head
from folovllm.engine.build_batch import layer_set
from folovllm.models.draft_head import DraftHead
from folovllm.models.files import resolve_model
from folovllm.models.model_config import window_of
from folovllm.models.registry import get_model_class

if TYPE_CHECKING:
    from folovllm.engine.setup import EngineSetup
    from folovllm.models.llama import LlamaForCausalLM


def head_of(setup: EngineSetup, config: SpeculativeConfig) -> tuple[type[DraftHead], Path]:
    """Return the head's class and folder. Raises ValueError if the model has none."""
    if config.head == "eagle3":
        assert config.model is not None
        return Eagle3Head, resolve_model(config.model)
    own = cast("type[DraftHead] | None", get_model_class(setup.hf_config).mtp_head)
    if own is None:
        names = ", ".join(setup.hf_config.architectures)
        raise ValueError(f'method "mtp" needs a model whose checkpoint holds a head, and {names} has none')
    return own, setup.path


def check_head(setup: EngineSetup, config: SpeculativeConfig) -> None:
    """Raise ValueError, before weights are loaded, where the head does not fit the model or the engine."""
    if window_of(setup.hf_config) is not None:
        raise ValueError(
            f'method "{config.head}" needs the K/V of all tokens, and every layer of this model has a sliding window: '
            "choose another method"
        )
    head, path = head_of(setup, config)
    head.check(setup, path)


def make_head(setup: EngineSetup, config: SpeculativeConfig, target: LlamaForCausalLM) -> DraftHead:
    """Return the head of `target`, loaded. `setup` describes the whole model, not a rank's shard: each rank has the whole head."""
    head, path = head_of(setup, config)
    return head.load(setup, path, target, layer_set(setup))
