"""The engine under test: the reference in its own stage and in the last, or a learner's by FOLOVLLM_MINI."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from milestones.mini import harness
from milestones.mini.given.contract import Limits
from milestones.mini.harness import REFERENCE, Trace, play
from milestones.mini.ledger import Ask, Rejected
from milestones.running_example import example
from tests.helpers import assert_varied, hf_model, margins, prompts, tiny_checkpoint, tolerance

STORIES = Path(__file__).resolve().parents[2] / "folovllm/assets/stories-5m"
LAST = 6


@cache
def loaded(path: Path) -> ModuleType:
    """The adapters of an engine; it is loaded once, and again if another was loaded meanwhile."""
    return harness.load(path)


Overwritten = tuple[tuple[int, int], ...]  # (so many tokens are computed, V of the token at this position changes)
CACHE_COUNTS = " (the harness has overwritten V in engine.cache and in transformers' cache: attention reads it there, and nowhere else)"
ATTEND_COUNTS = (
    " (the harness has added to what `attend` returns, and to the same in transformers: nothing else is used)"
)


@cache
def answer(
    folder: Path, prompt: tuple[int, ...], max_tokens: int, overwritten: Overwritten = (), shifted: bool = False
) -> tuple[list[int], int]:
    """The greedy answer of transformers, and how many of its first tokens are no close call (`tests/helpers.py`).

    `overwritten` and `shifted`: the harness interferes with the cache, or with what attention gives.
    """
    with shifted_attention(hf_model(folder)) if shifted else nullcontext():
        tokens, logits = hf_answer(hf_model(folder), prompt, max_tokens, dict(overwritten))
    close = (margins(logits) <= 2 * tolerance(logits)).nonzero().flatten().tolist()
    return tokens, min([*close, max_tokens])


@torch.inference_mode()
def hf_answer(
    model: Any, prompt: Sequence[int], max_tokens: int, overwritten: dict[int, int]
) -> tuple[list[int], torch.Tensor]:
    """`max_tokens` greedy tokens behind `prompt`, and their logits [max_tokens, V], through a cache that is overwritten meanwhile."""
    tokens, past, done, logits = list(prompt), None, 0, list[torch.Tensor]()
    while len(logits) < max_tokens:
        end = min([cut for cut in overwritten if done < cut < len(tokens)], default=len(tokens))
        output = model(torch.tensor([tokens[done:end]]), past_key_values=past, use_cache=True)
        past, done = output.past_key_values, end
        if done in overwritten:
            values = [layer.values[0] for layer in past.layers]  # each [Hkv, n, D]
            num_heads, _, dim = values[0].shape
            new = harness.other_values(len(values), num_heads, dim, overwritten[done])
            for value, other in zip(values, new, strict=True):
                value[:, overwritten[done]] = other
        if done == len(tokens):
            logits.append(output.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], torch.stack(logits)


@contextmanager
def shifted_attention(model: Any) -> Iterator[None]:
    """Add to what attention gives, before its projection, what the harness adds to what `attend` returns."""
    layers, config = model.model.layers, model.config
    added = harness.shifts(len(layers), config.num_attention_heads, config.head_dim).flatten(2)  # [L, length, Hq D]
    lengths = [0] * len(layers)

    def add(layer: int, module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        [x] = inputs  # [1, n, Hq D]
        start, lengths[layer] = lengths[layer], lengths[layer] + x.shape[1]
        return (x + added[layer, start : start + x.shape[1]],)

    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(partial(add, i)) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def asks_for(
    prompts: Sequence[Sequence[int]], lengths: Sequence[int], arrives: Sequence[int] = (), folder: Path | None = None
) -> list[Ask]:
    """Requests a, b, c, ... with the answers that they should get."""
    found = []
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        tokens, num_certain = answer(folder or tiny_checkpoint(), tuple(prompt), length)
        found.append(Ask(chr(ord("a") + i), tuple(prompt), tuple(tokens), arrives[i] if arrives else 0, num_certain))
    return found


def random_asks(sizes: Sequence[tuple[int, int]], arrives: Sequence[int] = (), seed: int = 0) -> list[Ask]:
    """Requests with random prompts: (tokens of the prompt, tokens of the answer)."""
    asks = asks_for(prompts([n for n, _ in sizes], seed), [n for _, n in sizes], arrives)
    if len(asks) > 1 and all(len(ask.answer) > 7 for ask in asks):
        assert_varied([ask.answer for ask in asks])
    return asks


def interfered(ask: Ask, overwritten: Overwritten = (), shifted: bool = False) -> Ask:
    """The same request where the harness interferes: another answer is right, and it shows."""
    tokens, num_certain = answer(tiny_checkpoint(), tuple(ask.prompt), ask.max_tokens, overwritten, shifted)
    assert tokens[: min(num_certain, ask.num_certain)] != list(ask.answer)[: min(num_certain, ask.num_certain)], (
        f"interfering with {ask.id} changes no token that is certain"
    )
    note = CACHE_COUNTS if overwritten else ATTEND_COUNTS
    return replace(ask, answer=tuple(tokens), num_certain=num_certain, overwritten=dict(overwritten), note=note)


def overwritten_asks(sizes: Sequence[tuple[int, int]], arrives: Sequence[int] = (), seed: int = 0) -> list[Ask]:
    """Random requests, where V of a prompt's first token, of its last and of the answer's newest token are overwritten, one after the other."""
    asks = random_asks(sizes, arrives, seed)
    times = [{n: 0, n + 2: n - 1, n + 5: n + 4} for n, _ in sizes]
    return [interfered(ask, tuple(when.items())) for ask, when in zip(asks, times, strict=True)]


def running_example(late: int = 0) -> list[Ask]:
    """A, B and C of the chapters, on the model of the course; C comes `late` steps after the others."""
    return [Ask(r.name, r.prompt_token_ids, r.answer_token_ids, late * (r.name == "C")) for r in example().requests]


def slots(max_seqs: int, length: int = 64) -> Limits:
    """Limits of stage 2: a block is as long as any text, and a step may compute all prompts."""
    return Limits(max_seqs, length, max_seqs, max_seqs * length)


@dataclass(frozen=True)
class Mini:
    """An engine under test, in a stage."""

    path: Path
    stage: int

    @property
    def adapters(self) -> ModuleType:
        if harness.loaded != self.path:
            loaded.cache_clear()
        return loaded(self.path)

    def play(
        self,
        asks: Sequence[Ask],
        limits: Limits = slots(4),  # noqa: B008 -- a value
        folder: Path | None = None,
        *,
        shifts: bool = False,
    ) -> Trace:
        """Serve requests on the tiny model. A step that cannot be right fails the test by a sentence, and nothing else."""
        with self.sentence():
            return play(self.adapters, folder or tiny_checkpoint(), Trace(limits, asks, shifts=shifts), self.stage)

    @contextmanager
    def sentence(self) -> Iterator[None]:
        """What the engine's code does wrong in here fails the test by a sentence, and nothing else. It finds no engine's modules."""
        try:
            with harness.engine_runs():
                yield
            return
        except Rejected as error:
            said = str(error)
        except NotImplementedError as error:
            said = f"not written yet: {error}"
        pytest.fail(said, pytrace=False)

    def beside(self, asks: Sequence[Ask], limits: Limits) -> tuple[Trace, Trace]:
        """What the engine and the reference, in the same stage, do with the same requests."""
        own = self.play(asks, limits)
        return own, Mini(REFERENCE, self.stage).play(asks, limits)


@cache
def odd_checkpoint(*, old: bool = False) -> Path:
    """A tiny model with another epsilon and another theta, if `old` as older files write it."""
    rope = {"rope_type": "default", "rope_theta": 300.0}
    folder = tiny_checkpoint(rms_norm_eps=0.3, rope_parameters=rope)
    if not old:
        return folder
    copy = folder.with_name(f"{folder.name}-old")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 300.0, "rope_scaling": None}))
    return copy


@cache
def reference(stage: int) -> Trace:
    """What the reference does with three requests in memory for two."""
    limits = slots(2) if stage < 3 else Limits(12, 4, 3, 64)
    return Mini(REFERENCE, stage).play(random_asks([(8, 16), (8, 16), (9, 8)], [0, 0, 3]), limits)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mini" not in metafunc.fixturenames:
        return
    found = re.search(r"stage(\d)", metafunc.module.__name__)
    own = int(found[1]) if found else LAST
    if folder := os.environ.get("FOLOVLLM_MINI"):
        stage = int(os.environ["FOLOVLLM_MINI_STAGE"])
        metafunc.parametrize("mini", [Mini(Path(folder), stage)], ids=["yours"])
    else:
        stages = sorted({own, LAST})
        metafunc.parametrize(
            "mini", [Mini(REFERENCE, stage) for stage in stages], ids=[f"reference-{s}" for s in stages]
        )
