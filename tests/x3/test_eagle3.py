"""An EAGLE-3 head drafts what the published definition drafts, whatever was accepted before, and no text changes."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from folovllm.attention.backends.torch_paged import TorchPagedBackend
from folovllm.electives.spec_decode.chain_proposer import HeadProposer
from folovllm.electives.spec_decode.draft_steps import draft_buckets
from folovllm.electives.spec_decode.proposer import RowState
from folovllm.llm import LLM
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams
from folovllm.worker import graph_runner
from folovllm.worker.buckets import prompt_bucket
from tests.helpers import prompts, tiny_checkpoint
from tests.workloads import Request, serve
from tests.x3.eagle_folders import PlainHead, write_head
from tests.x3.engines import Pair, make_engine, speculation_of
from tests.x3.test_lossless import LETTERS, demanding_pair

CLOSE = 1e-3  # two logits that rounding may swap
FEW = LETTERS[:3]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, allowed_token_ids=FEW)


def eagle(folder: Path, k: int = 3, adaptive: bool = False, method: str = "eagle3") -> dict[str, Any]:
    """The part of a configuration that turns a head on."""
    given = {"method": method, "model": str(folder), "num_speculative_tokens": k, "adaptive": adaptive}
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
def reference(target: Path) -> Any:
    """The target by transformers."""
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()


@cache
def hidden_states(target: Path, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a text, [L + 1, n, H]: before each layer, and behind the last norm; and the embedding."""
    model = reference(target)
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat(states), model.get_input_embeddings().weight.detach()


Plain = Callable[[tuple[int, ...], list[int], int], tuple[list[int], float]]


def num_compared(drafted: Drafted, load: list[Request], outputs: list[RequestOutput], plain: Plain) -> int:
    """Each draft is the plain loop's (of a whole text, its beginning and k), up to a close call. How many tokens were compared."""
    texts = [(*one.prompt, *out.outputs[0].token_ids) for one, out in zip(load, outputs, strict=True)]
    count = 0
    for text, draft in drafted.found:
        whole = next(one for one in texts if one[: len(text)] == tuple(text))
        wanted, margin = plain(whole, text, len(draft))
        if margin > CLOSE:
            assert draft == wanted, f"behind {len(text)} tokens"
            count += len(draft)
    return count


def check_drafts(
    drafted: Drafted, folder: Path, target: Path, load: list[Request], outputs: list[RequestOutput], layers: tuple[int, ...] = (0, 1, 2)
) -> int:  # fmt: skip
    """As `num_compared`, beside the published definition."""

    def plain(whole: tuple[int, ...], text: list[int], k: int) -> tuple[list[int], float]:
        states, embedding = hidden_states(target, whole)
        own = states[list(layers)][:, : len(text) - 1].transpose(0, 1)
        return PlainHead(folder, target, embedding).drafts(own, text, k)

    return num_compared(drafted, load, outputs, plain)


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
def test_sixty_random_heads_draft_as_published(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        drafted.found.clear()
        engine = make_engine(**fields, **eagle(folder, rng.randint(1, 4)))
        outputs = serve(engine, load)
        count += check_drafts(drafted, folder, target, load, outputs, tuple(layers))
        accepted += speculation_of(engine).num_accepted
        engine.close()
    assert count > 150 and accepted > 20, "drafts were compared, behind accepted ones, too"


@cache
def whole_head() -> Path:
    """A head that knows all ids: what it drafts shows any number that is wrong."""
    return write_head(Path(tempfile.mkdtemp()) / "head", tiny_checkpoint())


@cache
def head_of(*ids: int) -> Path:
    """A head that knows these alone."""
    return only(write_head(Path(tempfile.mkdtemp()) / "head", tiny_checkpoint()), list(ids))


def letters_head() -> Path:
    return head_of(*LETTERS)


def few_head() -> Path:
    return head_of(*FEW)


@pytest.mark.parametrize(("preset", "adaptive", "method"), [
    ("m2", False, "eagle3"), ("m5", False, "eagle3"), ("m6", True, "eagle3"), ("m6", False, "ngram+eagle3"),
])  # fmt: skip
def test_all_that_a_sample_depends_on_is_kept(preset: str, adaptive: bool, method: str) -> None:
    """Penalties, grammars, stop strings, log-probabilities: what every proposer must keep."""
    pair = demanding_pair(preset)
    engine = make_engine(**pair.fields, **eagle(letters_head(), adaptive=adaptive, method=method))
    pair.check(serve(engine, pair.requests))
    made = speculation_of(engine)
    assert made.num_draft_tokens > 0
    assert adaptive or (made.num_draft_tokens > 20 and made.num_accepted > 2), "times decide how many, where it adapts"


CROWDED: dict[str, dict[str, Any]] = {
    "few blocks": {"num_kv_blocks": 40, "enable_prefix_caching": False},
    "short chunks": {"max_num_batched_tokens": 16},
    "one at a time": {"async_scheduling": False},
    "eager": {"enforce_eager": True},
    "captured": {},
    "triton": {"attention_backend": "triton"},
    "FP8 cache": {"kv_cache_dtype": "fp8"},
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.slow] * (how == "triton")) for how in CROWDED])
def test_however_steps_are_made(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preempted, in chunks, with steps that overlap or not; the drafts stay those of the definition."""
    count, length = (6, 12) if how != "triton" else (2, 4)
    load = [Request(one, replace(GREEDY, max_tokens=2 * length)) for one in prompts([length] * count, seed=8)]
    fields = {"milestone": "m6", "block_size": 16 if how == "triton" else 4, "max_model_len": 40, **CROWDED[how]}
    pair = Pair.of(load, **fields)
    if how == "captured":  # steps with prompts and with drafts, as on a GPU
        monkeypatch.setattr(TorchPagedBackend, "supports_prompt_graph", True)
        buckets = [prompt_bucket(80, 2), prompt_bucket(80, 8), *draft_buckets(24)]
        monkeypatch.setattr(graph_runner, "buckets_for", lambda *_: buckets)
    drafted, folder = Drafted().watch(monkeypatch), few_head()
    engine = make_engine(**pair.fields, **eagle(folder))
    outputs = serve(engine, load)
    pair.check(outputs)
    assert engine.core.num_preemptions > 0 or how != "few blocks"
    if how != "FP8 cache":  # its hidden states are others
        assert check_drafts(drafted, folder, tiny_checkpoint(), load, outputs) > 4 * count
    assert speculation_of(engine).num_accepted > 0


def test_a_chain_writes_to_no_block_of_another_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes on behind the last block that its sequence has."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    load = [Request(one, params) for one in prompts([12] * 3, seed=8)]
    drafted = Drafted().watch(monkeypatch)
    outputs = serve(make_engine(milestone="m6", block_size=4, **eagle(whole_head())), load)
    assert check_drafts(drafted, whole_head(), tiny_checkpoint(), load, outputs) > 120


@pytest.mark.parametrize("top_k", [0, 250], ids=["plain", "filtered"])
def test_drafts_are_sampled_by_the_noise_of_their_positions(top_k: int) -> None:
    """Where it is hot the noise alone decides, so nearly all are right."""
    params = SamplingParams(temperature=100, top_k=top_k, seed=4, max_tokens=24, ignore_eos=True)
    engine = make_engine(milestone="m6", **eagle(whole_head()))
    serve(engine, [Request(one, params) for one in prompts([12, 5], seed=8)])
    made = speculation_of(engine)
    assert made.num_accepted > 0.7 * made.num_draft_tokens > 20


def begin_alike(params: SamplingParams) -> list[Request]:
    (first,) = prompts([22], seed=2)
    return [Request([*first[:n], *tail], params) for n, tail in ((22, []), (20, [7, 8]), (22, [9]), (13, [1]))]


def served_one_by_one(pair: Pair, head: dict[str, Any]) -> list[RequestOutput]:
    """Requests that begin alike find one block of four tokens less than is cached."""
    engine, hits, outputs = make_engine(**pair.fields, **head), [0], list[RequestOutput]()
    for one in pair.requests:
        outputs += serve(engine, [one])
        hits.append(engine.scheduler.kv.stats.tokens_hit)
    pair.check(outputs)
    assert hits == [0, 0, 16, 32, 40]
    return outputs


def test_a_prefix_hit_brings_no_hidden_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block of a hit is computed again; the head's K/V of the others are found, and drafts are the same."""
    load = begin_alike(GREEDY)
    drafted, folder = Drafted().watch(monkeypatch), few_head()
    outputs = served_one_by_one(Pair.of(load, milestone="m6", block_size=4), eagle(folder))
    assert check_drafts(drafted, folder, tiny_checkpoint(), load, outputs) > 20


def test_a_folder_of_speculators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tensors under other names, and the layer's fields in a dict of their own."""
    folder, target = only(write_head(tmp_path / "head", tiny_checkpoint()), FEW), tiny_checkpoint()
    fields = json.loads((folder / "config.json").read_text())
    layers = fields.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    draft_vocab_size = fields.pop("draft_vocab_size")
    whole = {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "transformer_layer_config": fields,
        "draft_vocab_size": draft_vocab_size, "eagle_aux_hidden_state_layer_ids": layers, "target_hidden_size": None,
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "x"}},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace("midlayer", "layers.0"): t for name, t in tensors.items()}, folder / "model.safetensors")
    drafted = Drafted().watch(monkeypatch)
    load = [Request(prompts([9])[0], GREEDY)]
    outputs = serve(make_engine(milestone="m6", model=str(target), **eagle(folder)), load)
    assert check_drafts(drafted, folder, target, load, outputs, tuple(layers)) > 5


def wrong(folder: Path, **given: Any) -> Path:
    """The head with other fields in its configuration; None takes one out."""
    fields = json.loads((folder / "config.json").read_text()) | given
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def without(folder: Path, name: str, tensor: torch.Tensor | None = None) -> Path:
    """The head without a tensor, or with another in its place."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), folder / "model.safetensors")
    return folder


BAD: dict[str, tuple[Any, str]] = {
    "another model's": (lambda at: wrong(at, target_hidden_size=99), "reads hidden states of 99 numbers"),
    "another vocabulary": (lambda at: wrong(at, vocab_size=1000), "vocab_size is 1000"),
    "too large a draft vocabulary": (lambda at: wrong(at, draft_vocab_size=9999), "draft_vocab_size is 9999"),
    "unknown layers": (lambda at: wrong(at, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}), "layer_ids"),
    "no EAGLE-3": (lambda at: wrong(at, architectures=["LlamaForCausalLM"]), "no EAGLE-3 head"),
    "no size": (lambda at: wrong(at, hidden_size=None), "hidden_size is None"),
    "two layers": (lambda at: wrong(at, num_hidden_layers=2), "only heads of one layer"),
    "no map": (lambda at: without(at, "d2t"), "lacks 'd2t'"),
    "a map to nowhere": (lambda at: without(at, "d2t", torch.full((16,), 9999)), "'d2t' does not lead"),
    "a short map": (lambda at: without(at, "d2t", torch.zeros(3, dtype=torch.int64)), r"'d2t' has shape \[3\]"),
    "a missing weight": (lambda at: without(at, "fc.weight"), "'fc.weight' is missing"),
    "a weight of another shape": (lambda at: without(at, "norm.weight", torch.ones(5)), r"'norm.weight' has shape \[5\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_head_that_does_not_fit_is_refused_early(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, says = BAD[what]
    folder = spoil(only(write_head(tmp_path / "head", tiny_checkpoint()), LETTERS))
    assert_refused(monkeypatch, folder, says, **eagle(folder))


def assert_refused(monkeypatch: pytest.MonkeyPatch, folder: Path, says: str, **fields: Any) -> None:
    monkeypatch.setattr("folovllm.models.loader.load_model", None)
    with pytest.raises(ValueError, match=says) as raised:
        make_engine(milestone="m6", **fields)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(("fields", "given", "sentence"), [
    ({}, {"method": "mtp"}, "Qwen3ForCausalLM has none"),
    ({}, {"method": "eagle3"}, '"eagle3" needs a head'),
    ({}, {"method": "eagle3", "model": 5}, "must be a text, not 5"),
    ({}, {"method": "mtp", "model": "x"}, "no other method takes one"),
    ({}, {"method": "eagle3+draft_model", "model": "x"}, "do not work together"),
    ({"milestone": "m1"}, {"method": "mtp"}, "steps of several tokens"),
    ({"model": str(tiny_checkpoint("llama", architectures=["MistralForCausalLM"], sliding_window=8))},
     {"method": "eagle3", "model": "head"}, "sliding window"),
])  # fmt: skip
def test_what_cannot_have_a_head(fields: dict[str, Any], given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_engine(**{"milestone": "m6", **fields}, speculative_config=given)


def test_the_embedded_head() -> None:
    """On stories that it has not seen it is right nearly always; seeded texts stay the same, too."""
    asked = ["Tell me a story about a brave cat named Mia.", "Tell me a story about a green boat."]
    with LLM("stories-5m", device="cpu", max_model_len=256, use_tqdm=False) as llm:
        chats = [[{"role": "user", "content": one}] for one in asked]
        tokenizer, how = llm.engine.tokenizer, {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        tokens = [tokenizer.apply_chat_template(chat, **how) for chat in chats]
    load = [Request(one, SamplingParams(temperature=0, max_tokens=60)) for one in tokens]
    load += [Request(one, SamplingParams(temperature=0.8, seed=4, max_tokens=60)) for one in tokens]
    pair = Pair.of(load, model="stories-5m", milestone="m6", max_model_len=256)
    engine = make_engine(**pair.fields, **eagle(Path("stories-eagle3")))
    pair.check(serve(engine, load))
    made = speculation_of(engine)
    assert 1 + made.num_accepted / made.num_drafts > 3.2
