"""Which experts a model asks for which token: what its router says while texts run through the engine.

from milestones.routing import routing_of
routing = routing_of("Lily had a red kite.")
routing.experts[2, 5]      # of layer 2, token 5: the experts, the most important first
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

MODEL = "stories-moe"
Choice = tuple[Any, Any]  # weights and experts [T, k] of one layer in one step, two tensors


@dataclass(frozen=True)
class Routing:
    """One text. L layers, T tokens, each of which asks k of E experts."""

    pieces: tuple[str, ...]  # the tokens as text
    experts: npt.NDArray[np.int64]  # [L, T, k]
    weights: npt.NDArray[np.float64]  # [L, T, k]
    num_experts: int

    def counts(self) -> npt.NDArray[np.int64]:
        """How many pairs (token, expert) each expert of each layer has: [L, E]."""
        return np.stack([np.bincount(layer.ravel(), minlength=self.num_experts) for layer in self.experts])


@contextmanager
def recorded() -> Iterator[list[Choice]]:
    """Within this, what the router says is noted: layer after layer, step after step. On a CPU, in this very process."""
    from folovllm.electives.moe import layers as moe

    noted: list[Choice] = []
    route = moe.route

    def noting(*arguments: Any, **named: Any) -> Choice:
        noted.append(route(*arguments, **named))
        return noted[-1]

    with patch.object(moe, "route", noting):
        yield noted


def routings(texts: Iterable[str], model: str = MODEL, most: int = 512) -> list[Routing]:
    """Run each text, cut off after `most` tokens, through the model in a step of its own."""
    from folovllm import LLM, SamplingParams
    from folovllm.models.model_config import num_experts_of

    found = []
    with LLM(
        model, milestone="m3", device="cpu", max_model_len=most + 1, max_num_batched_tokens=most + 1, use_tqdm=False
    ) as llm:
        tokenizer, num_experts = llm.engine.tokenizer, num_experts_of(llm.engine.setup.hf_config)
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False)[:most]
            with recorded() as noted:
                llm.generate([ids], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
            weights, experts = (np.stack([choice[i].numpy() for choice in noted]) for i in (0, 1))
            found.append(Routing(tuple(tokenizer.decode([id]) for id in ids), experts, weights, num_experts))
    return found


def routing_of(text: str, model: str = MODEL) -> Routing:
    """One text."""
    return routings([text], model)[0]


def read_by(groups: Iterable[npt.NDArray[np.int64]]) -> float:
    """How many different experts a step reads on average: each group [n, k] is what n tokens of a step ask in one layer."""
    return float(np.mean([len(np.unique(group)) for group in groups]))


def expected(num_experts: int, asked: int, num_tokens: int) -> float:
    """The same if each expert were as likely as any other, for every token anew: E (1 - (1 - k / E)^n)."""
    from folovllm.apps.bench.roofline import experts_read

    return experts_read(num_experts, asked, num_tokens)
