"""An EAGLE-3 head drafts what the published definition drafts, whatever was accepted before, and no text changes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from folovllm.electives.spec_decode.head_proposer import HeadProposer
from folovllm.electives.spec_decode.proposer import RowState
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import Request, serve
from tests.x3.eagle_folders import PlainHead, write_head
from tests.x3.engines import Pair, make_engine, speculation_of
from tests.x3.test_lossless import LETTERS, demanding_pair

CLOSE = 1e-3  # two logits that rounding may swap
FEW = LETTERS[:3]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, allowed_token_ids=FEW)


def eagle(folder: Path, k: int = 3, adaptive: bool = False) -> dict[str, Any]:
    """The part of a configuration that turns a head on."""
    given = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": k, "adaptive": adaptive}
    return {"speculative_config": given}


def only(folder: Path, ids: list[int]) -> Path:
    """The head, of which only some ids are left: so it agrees now and then with a model that may say nothing else."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"lm_head.weight": tensors["lm_head.weight"][: len(ids)].clone()}
    tensors["d2t"] = torch.tensor(sorted(ids)) - torch.arange(len(ids))
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "draft_vocab_size": len(ids)}))
    return folder


@dataclass
class Drafted:
    """What was proposed: the text, its newest token included, and the draft."""

    found: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> Drafted:
        propose = HeadProposer.propose_all

        def watched(proposer: HeadProposer, states: list[RowState], ks: list[int]) -> list[list[int]]:
            drafts = propose(proposer, states, ks)
            for state, draft in zip(states, drafts, strict=True):
                if state.seq_id >= 0 and draft:  # no measurement
                    known, resolved = state.token_ids.tolist(), proposer.resolve(draft)
                    at = state.num_in_flight
                    self.found.append(([*known, *resolved[:at]], resolved[at:]))
            return drafts

        monkeypatch.setattr(HeadProposer, "propose_all", watched)
        return self


@cache
def hidden_states(target: Path, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a text, [L + 1, n, H]: before each layer, and behind the last norm; and the embedding."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat(states), model.get_input_embeddings().weight.detach()


def check_drafts(drafted: Drafted, folder: Path, target: Path, layers: list[int], texts: list[list[int]]) -> int:
    """Each draft is the plain loop's, up to a close call. Returns how many tokens were compared."""
    count = 0
    for text, draft in drafted.found:
        whole = next(tuple(one) for one in texts if one[: len(text)] == text)
        states, embedding = hidden_states(target, whole)
        plain = PlainHead(folder, target, embedding)
        own = states[layers][:, : len(text) - 1].transpose(0, 1)
        wanted, margin = plain.drafts(own, text, len(draft))
        if margin > CLOSE:
            assert draft == wanted, f"behind {len(text)} tokens"
            count += len(draft)
    return count


def random_case(rng: random.Random) -> tuple[Path, dict[str, Any], list[int]]:
    """A target, the fields of a head, and the layers that it reads."""
    target = tiny_checkpoint(rng.choice(("qwen3", "llama")), tied=rng.random() < 0.5)
    layers = sorted(rng.sample(range(3), rng.choice((2, 3))))
    kv_heads = rng.choice((1, 2))
    fields: dict[str, Any] = {
        "num_attention_heads": kv_heads * rng.choice((1, 2, 3)), "num_key_value_heads": kv_heads,
        "head_dim": rng.choice((16, 32)), "intermediate_size": rng.choice((16, 40)),
        "norm_before_residual": rng.random() < 0.5, "norm_output": rng.random() < 0.3,
        "norm_before_fc": rng.random() < 0.3, "fc_norm": rng.random() < 0.3, "own_embedding": rng.random() < 0.3,
        "model_type": rng.choice(("llama", "llama", "qwen3")), "rope_theta": rng.choice((100.0, 10000.0)),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }  # fmt: skip
    if fields["own_embedding"]:
        fields |= {"hidden_size": 24, "target_hidden_size": 72}
    return target, fields, layers


@pytest.mark.parametrize("part", range(6))
def test_sixty_random_heads_draft_as_the_published_definition(
    part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, accepted = 0, 0
    drafted = Drafted().watch(monkeypatch)
    for number in range(10 * part, 10 * part + 10):
        rng = random.Random(number)
        target, fields, layers = random_case(rng)
        folder = write_head(tmp_path / str(number), target, number, **fields)
        params = GREEDY
        if rng.random() < 0.8:
            only(folder, FEW)
        else:
            params = replace(GREEDY, allowed_token_ids=None)
        load = [Request(prompt, params) for prompt in prompts([rng.randint(1, 20), 5], seed=number)]
        milestone = rng.choice(("m2", "m5", "m6", "m6"))
        fields = {"model": str(target), "milestone": milestone}
        if milestone != "m2":
            fields |= {"block_size": 4, "max_num_batched_tokens": rng.choice((12, 64))}
        pair = Pair.of(load, **fields)
        drafted.found.clear()
        engine = make_engine(**pair.fields, **eagle(folder, rng.randint(1, 4)))
        outputs = serve(engine, load)
        pair.check(outputs)
        texts = [[*one.prompt, *out.outputs[0].token_ids] for one, out in zip(load, outputs, strict=True)]
        count += check_drafts(drafted, folder, target, layers, texts)
        accepted += speculation_of(engine).num_accepted
        engine.close()
    assert count > 150 and accepted > 20, "drafts were compared, behind accepted ones, too"


@cache
def letters_head() -> Path:
    """A head that knows the letters alone."""
    import tempfile

    return only(write_head(Path(tempfile.mkdtemp()) / "head", tiny_checkpoint()), LETTERS)


@pytest.mark.parametrize(("preset", "adaptive"), [("m2", False), ("m5", False), ("m6", False), ("m6", True)])
def test_all_that_a_sample_depends_on_is_kept(preset: str, adaptive: bool) -> None:
    """Penalties, grammars, stop strings, log-probabilities: what every proposer must keep."""
    pair = demanding_pair(preset)
    engine = make_engine(**pair.fields, **eagle(letters_head(), adaptive=adaptive))
    pair.check(serve(engine, pair.requests))
    made = speculation_of(engine)
    assert made.num_draft_tokens > 20 and made.num_accepted > 2
