"""The head within a hybrid model's checkpoint drafts what the published definition drafts, and no text changes."""

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm.electives.rollouts.sleep import sleep, wake_up
from folovllm.electives.rollouts.weights import update_weights
from folovllm.outputs import RequestOutput
from folovllm.sampling_params import SamplingParams
from tests.helpers import prompts
from tests.workloads import Request, serve
from tests.x3.engines import Pair, make_engine, speculation_of
from tests.x3.mtp_folders import PlainMtp, with_head
from tests.x3.test_eagle3 import Drafted, assert_refused, begin_alike, hidden_states, num_compared, served_one_by_one
from tests.x3.test_lossless import LETTERS, demanding
from tests.x5.checkpoints import hybrid_checkpoint

FEW = LETTERS[:3]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def mtp(k: int = 3, adaptive: bool = False) -> dict[str, Any]:
    """The part of a configuration that turns the head on."""
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": k, "adaptive": adaptive}}


def random_case(rng: random.Random, folder: Path, experts: bool) -> Path:
    """A model of any family, with a head."""
    families = ("qwen3_next with experts", "qwen3_5_moe_text") if experts else ("qwen3_next", "qwen3_5_text")
    heads, kv_heads = rng.choice([(4, 2), (2, 1), (3, 3), (6, 2)])
    target = hybrid_checkpoint(
        rng.choice(families), rng.choice(["LF", "FL", "LLF"]), num_heads=heads, num_kv_heads=kv_heads, tied=False,
        head_dim=rng.choice([16, 32]), linear_conv_kernel_dim=rng.choice([2, 4]),
        partial_rotary_factor=rng.choice([0.25, 0.5, 1.0]),
    )  # fmt: skip
    return with_head(folder, target, FEW, rng.randint(0, 99), stacked=experts and rng.random() < 0.5)


def check_drafts(drafted: Drafted, folder: Path, load: list[Request], outputs: list[RequestOutput]) -> int:
    """Each draft is the plain loop's, up to a close call. Returns how many tokens were compared."""
    head = PlainMtp(folder)
    return num_compared(
        drafted, load, outputs,
        lambda whole, text, k: head.drafts(hidden_states(folder, whole)[0][-1, : len(text) - 1], text, k),
    )  # fmt: skip


def run(folder: Path, load: list[Request], drafted: Drafted, k: int, **fields: Any) -> tuple[int, int]:
    """Serve with the head and without. Returns how many draft tokens were compared, and how many accepted."""
    pair = Pair.of(load, model=str(folder), **fields)
    drafted.found.clear()
    engine = make_engine(**pair.fields, **mtp(k))
    outputs = serve(engine, load)
    pair.check(outputs)
    return check_drafts(drafted, folder, load, outputs), speculation_of(engine).num_accepted


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("part", range(3))
def test_random_heads_of_each_kind(part: int, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, accepted, drafted = 0, 0, Drafted().watch(monkeypatch)
    for number in range(10 * part, 10 * part + 10):
        rng = random.Random(number)
        folder = random_case(rng, tmp_path / str(number), experts)
        load = [Request(prompt, GREEDY) for prompt in prompts([rng.randint(1, 20), 5], seed=number)]
        milestone = rng.choice(("m2", "m5", "m6", "m6"))
        fields: dict[str, Any] = {"milestone": milestone}
        if milestone != "m2":
            fields |= {"block_size": 4, "snapshot_interval": 8, "max_num_batched_tokens": rng.choice((12, 64))}
        found = run(folder, load, drafted, rng.randint(1, 4), **fields)
        count, accepted = count + found[0], accepted + found[1]
    assert count > 150 and accepted > 20, "drafts were compared, behind accepted ones, too"


@cache
def a_model(family: str = "qwen3_5_text") -> Path:
    target = hybrid_checkpoint(family, "LF", tied=False, num_heads=2, num_kv_heads=1)
    return with_head(Path(tempfile.mkdtemp()) / "model", target, FEW)


def test_what_a_sample_depends_on_is_kept() -> None:
    pair = Pair.of(demanding(), model=str(a_model()), milestone="m6", block_size=4, max_num_seqs=6)
    engine = make_engine(**pair.fields, **mtp(adaptive=True))
    pair.check(serve(engine, pair.requests))


@pytest.mark.parametrize(("milestone", "experts"), [("m2", True), ("m6", False)])
def test_updates_reach_the_head(milestone: str, experts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a folder, as a mapping, and one tensor after the other; without its tensors it keeps its own."""
    target = hybrid_checkpoint("qwen3_5_moe_text" if experts else "qwen3_next", "LF", tied=False)
    old, new = (with_head(tmp_path / str(seed), target, FEW, seed, stacked=experts) for seed in (1, 2))
    load = [Request(prompt, GREEDY) for prompt in prompts([20, 5], seed=3)]
    blocks = {} if milestone == "m2" else {"block_size": 4}
    engine = make_engine(milestone=milestone, model=str(old), **blocks, **mtp())
    drafted, tensors = Drafted().watch(monkeypatch), load_file(new / "model.safetensors")
    alone = {name: w for name, w in tensors.items() if not name.startswith("mtp.")}
    first = next(name for name in tensors if name.startswith("mtp."))

    def check(folder: Path) -> None:
        drafted.found.clear()
        assert check_drafts(drafted, folder, load, serve(engine, load)) > 10

    check(old)
    for weights in new, alone, old, tensors, old, iter(tensors.items()), alone:
        update_weights(engine, weights)
        check(weights if isinstance(weights, Path) else new)
    update_weights(engine, old)
    for wrong, says in (
        ({name: w for name, w in tensors.items() if name != first}, "lacks mtp"),
        (tensors | {first: tensors[first][..., 1:]}, f"{first}|mtp.* has shape"),
        (tensors | {first: tensors[first].to(torch.int64)}, "int64"),
        (tensors | {"mtp.norm.bias": torch.zeros(3)}, "mtp.norm.bias.* no place"),
    ):
        with pytest.raises(ValueError, match=says):
            update_weights(engine, wrong)
        check(old)
    update_weights(engine, new)
    sleep(engine, 2)
    wake_up(engine)
    check(old)  # what it began with


@pytest.mark.parametrize("how", [
    {"num_kv_blocks": 40, "enable_prefix_caching": False}, {"max_num_batched_tokens": 16}, {"async_scheduling": False},
    {"attention_backend": "triton", "dtype": "float32", "block_size": 16},
], ids=str)  # fmt: skip
def test_however_steps_are_made(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    count, length = (2, 4) if "dtype" in how else (6, 12)
    params = SamplingParams(temperature=0, max_tokens=2 * length, ignore_eos=True)
    load = [Request(one, params) for one in prompts([length] * count, seed=8)]
    fields = {"milestone": "m6", "block_size": 4, "max_model_len": 40, "snapshot_interval": 8, **how}
    compared, _ = run(a_model(), load, Drafted().watch(monkeypatch), 3, **fields)
    assert compared > 3 * count


def test_a_prefix_hit_brings_no_hidden_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence begins at the last snapshot before the last block that is cached; drafts are the same."""
    load, drafted = begin_alike(GREEDY), Drafted().watch(monkeypatch)
    pair = Pair.of(load, model=str(a_model()), milestone="m6", block_size=4, snapshot_interval=4)
    assert check_drafts(drafted, a_model(), load, served_one_by_one(pair, mtp())) > 20


def test_random_weights() -> None:
    """To time a geometry, a head of random weights is made, too; the folder needs no tensors."""
    engine = make_engine(model=str(hybrid_checkpoint()), random_weights=True, milestone="m6", **mtp())
    serve(engine, [Request([1, 2, 3], GREEDY)])
    assert speculation_of(engine).num_draft_tokens > 5


def changed(folder: Path, drop: str | None = None, tensor: torch.Tensor | None = None, **given: Any) -> None:
    """The model with other fields, or without a tensor, or with another in its place."""
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | given))
    if drop is not None:
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: t for name, t in tensors.items() if not name.startswith(drop)}
        save_file(tensors | ({} if tensor is None else {drop: tensor}), folder / "model.safetensors", {"format": "pt"})


EXPERTS = "mtp.layers.0.mlp.experts.down_proj"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no head": ({"drop": "mtp."}, 'no tensor in .* begins with "mtp."'),
    "two layers": ({"mtp_num_hidden_layers": 2}, "the head has 2 layers"),
    "none": ({"num_nextn_predict_layers": 0}, "the head has 0 layers"),
    "its own embedding": ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true"),
    "a missing weight": ({"drop": "mtp.fc.weight"}, r"'mtp.fc.weight' is missing, and config.json asks for \[72, 144\]"),
    "another shape": ({"drop": "mtp.norm.weight", "tensor": torch.ones(5)}, r"'mtp.norm.weight' is \[5\]"),
    "an unknown weight": ({"drop": "mtp.x.weight", "tensor": torch.ones(5)}, "asks for no such tensor"),
    "a stack": ({"drop": EXPERTS, "tensor": torch.ones(3, 72, 32)}, rf"{EXPERTS}: .*\[3, 72, 32\].* expects \[4, 72, 32\]"),
    "codes": ({"drop": "mtp.fc.weight", "tensor": torch.ones(72, 144, dtype=torch.int8)}, "only heads in floating point"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_head_that_does_not_fit_is_refused_early(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, says = BAD[what]
    target = hybrid_checkpoint("qwen3_5_moe_text", "LF", tied=False)
    folder = with_head(tmp_path / "model", target, FEW, stacked=True)
    changed(folder, **spoil)
    assert_refused(monkeypatch, folder, says, model=str(folder), **mtp())


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next with experts"])
@pytest.mark.parametrize("eager", [False, True])
def test_on_a_gpu(family: str, eager: bool) -> None:
    """Captured chains and steps; texts agree until rounding decides."""
    load = [Request(one, GREEDY) for one in prompts([9, 5, 14, 30] * 4, seed=8)]
    fields = {"milestone": "m6", "device": "cuda", "dtype": "float32", "attention_backend": "triton", "max_num_seqs": 8}
    pair = Pair.of(load, model=str(a_model(family)), enforce_eager=eager, **fields)
    engine = make_engine(**pair.fields, **mtp())
    assert pair.share_of_equal(serve(engine, load)) >= 0.9
    assert speculation_of(engine).num_accepted > 10
