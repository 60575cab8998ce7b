"""The options of speculative decoding (X3), which are keywords of `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from folovllm.electives.spec_decode.config import gather

if TYPE_CHECKING:
    from folovllm.config import EngineConfig


@dataclass(slots=True, kw_only=True)
class SpeculationOptions:
    """How draft tokens are proposed. The second and third become parts of the first.

    Attributes:
        speculative_config: how draft tokens are proposed, as a dict with vLLM's keys, or one in JSON, such as
            {"method": "draft_model", "model": "stories-draft"}; see `SpeculativeConfig`.
        speculative_method: the method alone: "ngram", "suffix", "mtp" (a head in the model's own checkpoint), or several joined by
            "+", which are asked in turn ("ngram+suffix"). "draft_model" and "eagle3" need a model, which only the
            configuration above can name.
        num_speculative_tokens: the most draft tokens that a step verifies for one sequence.
    """

    speculative_config: Any = field(default=None, metadata={"flag_type": str})
    speculative_method: Any = field(default=None, metadata={"flag_type": str})  # or a `Proposer`
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        given = (self.speculative_config, self.speculative_method, self.num_speculative_tokens)
        if given != (None, None, None):
            self.speculative_config = gather(*given)
            self.speculative_method = self.num_speculative_tokens = None

    def check(self, config: EngineConfig) -> None:
        """Raise ValueError where these do not fit the rest of the configuration."""
        if self.speculative_config is not None and config.kv_cache == "growing":
            raise ValueError("speculative_config needs steps of several tokens: take milestone m2 or later")
        if self.speculative_config is not None and "scheduler" in config.builder_names:
            raise ValueError("speculative_config needs the engine's own scheduler: leave it out of builders")
