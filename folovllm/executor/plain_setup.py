"""The set-up of an engine on its way to another process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from folovllm.engine.setup import EngineSetup


def plain(setup: EngineSetup) -> EngineSetup:
    """The set-up as it can be sent: without what may not exist in another process.

    That is a class of the model's own, and a proposer of the user's, for which a name stands: it drafts where the scheduler is.
    """
    config, hf_config = setup.config, SimpleNamespace(**setup.hf_config.to_dict())
    speculation = config.extras.get("speculative_config")
    if speculation is not None and not speculation.methods:
        config = replace(config, extras={**config.extras, "speculative_config": replace(speculation, method="ngram")})
    return replace(setup, config=config, hf_config=hf_config)
