"""Other weights in place: what is computed, cached and captured afterwards is the new weights'."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm import LLM, SamplingParams
from folovllm.sampling_params import RequestOutputKind
from tests.helpers import FAMILIES as PLAIN
from tests.helpers import tiny_checkpoint
from tests.x4.checkpoints import FAMILIES as EXPERTS
from tests.x4.checkpoints import moe_checkpoint
from tests.x5.checkpoints import FAMILIES as HYBRIDS
from tests.x5.checkpoints import hybrid_checkpoint, stacked_checkpoint

NORM = "model.norm.weight"
PROMPT = list(range(1, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def engine(path: Path, **overrides: Any) -> LLM:
    config = {"max_model_len": 128, "num_kv_blocks": 64, "use_tqdm": False, "device": "cpu"}
    return LLM(str(path), **{**config, **overrides})


def tokens(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    return list(llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def rest(llm: LLM) -> list[Any]:
    """All that the engine has still to report."""
    outputs: list[Any] = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    return outputs


@pytest.fixture(scope="module")
def checkpoints(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one geometry."""
    first = tiny_checkpoint(getattr(request, "param", "qwen3"))
    return first, shuffled(first, tmp_path_factory.mktemp("other"))


# Phi3's checkpoints are packed as our layers are.
both_families = pytest.mark.parametrize("checkpoints", ["qwen3", "phi3"], indirect=True)


def shuffled(first: Path, other: Path) -> Path:
    """A checkpoint with the rows of every matrix in another order."""
    for file in first.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = load_file(first / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    mixed = {name: w[torch.randperm(len(w), generator=generator)] for name, w in weights.items()}
    save_file(mixed, other / "model.safetensors")
    return other


@pytest.mark.parametrize(
    ("checkpoints", "overrides"),
    [("qwen3", {"milestone": "m2"}), ("phi3", {"milestone": "m3"}), ("qwen3", {}), ("phi3", {})],
    indirect=["checkpoints"],
    ids=str,
)
def test_answers_as_if_it_began_with_these_weights(checkpoints: tuple[Path, Path], overrides: dict[str, Any]) -> None:
    first, other = checkpoints
    with engine(other, milestone="m3") as llm:
        expected = tokens(llm)
    with engine(first, **overrides) as llm:
        before = tokens(llm)
        llm.update_weights(other)
        assert tokens(llm) == expected != before
        llm.update_weights(load_file(first / "model.safetensors"))
        assert tokens(llm) == before, "back to the first weights, from tensors"


@both_families
def test_weights_come_out_as_they_went_in(checkpoints: tuple[Path, Path]) -> None:
    first, other = checkpoints
    with engine(first) as llm:
        addresses = {name: w.data_ptr() for name, w in llm.get_weights().items()}
        llm.update_weights(other)
        found, stored = llm.get_weights(), load_file(other / "model.safetensors")
        assert found.keys() == stored.keys()
        assert all(torch.equal(found[name], stored[name]) for name in stored)
        assert {name: w.data_ptr() for name, w in found.items()} == addresses, "captured steps read the old memory"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_file_comes_in_pieces(checkpoints: tuple[Path, Path], dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few rows, through pinned memory that is used again and again."""
    monkeypatch.setattr("folovllm.models.extra_tensors.PIECE", 1000)
    first, other = checkpoints
    with engine(first, milestone="m3", device="cuda", dtype=dtype) as llm:
        for path in (other, first, other):
            llm.update_weights(path)
        found, stored = llm.get_weights(), load_file(other / "model.safetensors")
        assert all(torch.equal(found[name].cpu(), stored[name].to(found[name].dtype)) for name in stored)


def test_a_prefix_of_older_weights_is_not_found(checkpoints: tuple[Path, Path]) -> None:
    first, other = checkpoints
    with engine(other, enable_prefix_caching=False) as llm:
        expected = tokens(llm)
    with engine(first) as llm:
        tokens(llm)
        llm.update_weights(other)
        assert tokens(llm) == expected, "K/V of the old weights were found again"
        hits = llm.engine.prefix_cache_stats().requests_hit
        assert tokens(llm) == expected
        assert llm.engine.prefix_cache_stats().requests_hit == hits + 1, "the new generation finds its own prefixes"


@pytest.mark.parametrize("in_flight", ["wait", "abort", "keep"])
def test_running_requests_finish_end_or_go_on(checkpoints: tuple[Path, Path], in_flight: str) -> None:
    first, other = checkpoints
    with engine(first) as llm:
        old = tokens(llm)
        llm.reset_prefix_cache()
        llm.engine.add_request("a", PROMPT, GREEDY, stream=False)
        for _ in range(5):
            llm.engine.step()
        llm.update_weights(other, in_flight=in_flight)
        (output,) = [o.outputs[0] for o in rest(llm) if o.finished]
        found = list(output.token_ids)
        if in_flight == "wait":
            assert found == old
        elif in_flight == "abort":
            assert output.finish_reason == "abort"
            assert 0 < len(found) < 16
            assert found == old[: len(found)]
        else:
            assert len(found) == 16
            assert found[:3] == old[:3]
            assert found != old
        with engine(other) as fresh:
            assert tokens(llm) == tokens(fresh), "what went on must not be found by later requests"


def breaks_off(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(load_file(path / "model.safetensors").items())[:3]
    raise ConnectionError("the trainer is gone")


@pytest.mark.parametrize("milestone", ["m3", "m6"])
@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_no_output_is_lost_and_steps_hand_them_out_in_order(
    checkpoints: tuple[Path, Path], in_flight: str, breaks: bool, milestone: str
) -> None:
    """One step's at a time: who reads deltas may expect one output of a request in a step."""
    first, other = checkpoints
    params = [replace(GREEDY, max_tokens=count, output_kind=RequestOutputKind.DELTA) for count in (6, 12)]
    with engine(first, milestone=milestone) as llm:
        expected = tokens(llm)
        for id_, each in zip("ab", params, strict=True):
            llm.engine.add_request(id_, PROMPT, each)
        seen = [llm.engine.step() for _ in range(4)]
        if breaks:
            with pytest.raises(ConnectionError, match="gone"):
                llm.update_weights(breaks_off(other), in_flight=in_flight)
        else:
            llm.update_weights(other, in_flight=in_flight)
        while llm.engine.has_unfinished_requests():
            seen.append(llm.engine.step())
        assert all(len({o.request_id for o in step}) == len(step) for step in seen)
        for id_, each in zip("ab", params, strict=True):
            own = [o for step in seen for o in step if o.request_id == id_]
            found = [token for o in own for token in o.outputs[0].delta_token_ids]
            assert [o.finished for o in own] == [False] * (len(own) - 1) + [True]
            assert found == expected[: len(found)]
            assert len(found) == each.max_tokens or in_flight == "abort"

        assert tokens(llm) != expected


@pytest.mark.parametrize("num_prompt_tokens", [3, 14])
def test_blocks_filled_later_keep_their_generation(checkpoints: tuple[Path, Path], num_prompt_tokens: int) -> None:
    """It has no full block yet when the weights change, so no hash: K/V of both weights get a name afterwards."""
    first, other = checkpoints
    with engine(first) as llm:
        llm.engine.add_request("a", PROMPT[:num_prompt_tokens], GREEDY, stream=False)
        llm.engine.step()
        llm.engine.step()
        llm.update_weights(other, in_flight="keep")
        (output,) = [o.outputs[0] for o in rest(llm) if o.finished]
        continued = [*PROMPT[:num_prompt_tokens], *output.token_ids]
        before = llm.engine.prefix_cache_stats().tokens_hit
        found = tokens(llm, continued)
        assert llm.engine.prefix_cache_stats().tokens_hit == before
        with engine(other) as fresh:
            assert found == tokens(fresh, continued)


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_weights_that_do_not_fit_end_no_request(checkpoints: tuple[Path, Path], in_flight: str) -> None:
    weights = load_file(checkpoints[0] / "model.safetensors")
    with engine(checkpoints[0]) as llm:
        expected = tokens(llm)
        llm.engine.add_request("a", PROMPT, GREEDY, stream=False)
        llm.engine.step()
        for wrong in ({}, {**weights, "model.norm.weight": torch.ones(3)}):
            with pytest.raises(ValueError, match=r"lacks|has shape"):
                llm.update_weights(wrong, in_flight=in_flight)
        assert [list(o.outputs[0].token_ids) for o in rest(llm) if o.finished] == [expected]


NO_PLACE = "model.layers.99.self_attn.q_proj.weight"
NO_WEIGHTS: list[tuple[Any, str]] = [
    (lambda weights: 5, "weights must be a folder, or tensors by the checkpoint's names, not int"),
    (lambda weights: [("a",)], "must hold pairs of a name and a tensor"),
    (lambda weights: iter([1]), "must hold pairs of a name and a tensor, not 1"),
    (lambda weights: weights | {5: torch.ones(1)}, "must hold pairs of a name and a tensor"),
    (lambda weights: weights | {NO_PLACE: torch.ones(1)}, "for which the model has no place"),
    (lambda weights: weights | {NORM: weights[NORM] * torch.nan}, "holds NaN or infinity as float32: the weights are"),
    (lambda weights: weights | {NORM: weights[NORM].to_sparse()}, "is sparse"),
    (lambda weights: weights | {NORM: weights[NORM][1:]}, r"model\.norm\.weight.*has shape"),
    (lambda weights: weights.pop(NORM) is None or weights, r"the given set of weights lacks model\.norm\.weight"),
]


@pytest.mark.parametrize(("damage", "says"), NO_WEIGHTS)
def test_what_are_no_weights_changes_nothing(checkpoints: tuple[Path, Path], damage: Any, says: str) -> None:
    first, _ = checkpoints
    with engine(first) as llm:
        before = tokens(llm)
        with pytest.raises(ValueError, match=says):
            llm.update_weights(damage({name: -w for name, w in load_file(first / "model.safetensors").items()}))
        assert tokens(llm) == before


def test_after_a_failed_update_no_older_prefix_is_found(checkpoints: tuple[Path, Path]) -> None:
    """What was copied before the failure stays."""
    first, other = checkpoints
    weights = load_file(other / "model.safetensors")
    del weights["model.norm.weight"]
    with engine(first) as llm:
        before = tokens(llm)
        with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
            llm.update_weights(iter(weights.items()))
        assert tokens(llm) != before
        assert llm.engine.prefix_cache_stats().tokens_hit == 0


FAMILIES = {
    **{family: partial(tiny_checkpoint, family) for family in (*PLAIN, "gemma3_text")},
    "llama, untied": partial(tiny_checkpoint, "llama", tied=False),
    **{family: partial(moe_checkpoint, family) for family in EXPERTS},
    **{family: partial(hybrid_checkpoint, family) for family in HYBRIDS},
    "qwen3_5_moe, in stacks": stacked_checkpoint,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_back_its_checkpoint(family: str) -> None:
    """The file's names and bytes, before and after an update with what was given."""
    path = FAMILIES[family]()
    stored = load_file(path / "model.safetensors")
    with engine(path) as llm:
        before = tokens(llm)
        for _ in range(2):
            found = {name: weight.clone() for name, weight in llm.get_weights().items()}
            assert found.keys() == stored.keys()
            assert not [name for name in stored if not torch.equal(found[name], stored[name].float())]
            llm.update_weights(found)
            assert tokens(llm) == before


def test_a_given_stack_of_another_shape_changes_nothing() -> None:
    with engine(stacked_checkpoint()) as llm:
        before = tokens(llm)
        weights = {name: weight.clone() + 1 for name, weight in llm.get_weights().items()}
        name = "model.layers.2.mlp.experts.down_proj"
        says = re.escape(f"{name!r} has shape [3, 72, 32], the model expects [4, 72, 32]")
        with pytest.raises(ValueError, match=says):
            llm.update_weights(weights | {name: weights[name][:3]})
        assert tokens(llm) == before


def test_a_number_in_the_place_of_a_convolution_is_named() -> None:
    """Weights that come one by one are cut before anybody compares their shapes."""
    path = FAMILIES[next(iter(HYBRIDS))]()
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if name.endswith("conv1d.weight"))
    with engine(path) as llm, pytest.raises(ValueError, match=r"conv1d.weight' has shape \[\], which cannot be cut"):
        llm.update_weights(iter({name: torch.tensor(1.0)}.items()))


@pytest.mark.parametrize("fails", ["it holds what has no place", "the mode is unknown", "the engine sleeps"])
def test_the_rest_is_received_after_a_failure(checkpoints: tuple[Path, Path], fails: str) -> None:
    """Who broadcasts waits until everything is taken."""
    weights = load_file(checkpoints[0] / "model.safetensors")
    taken = []

    def received() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in ({"nobody": torch.ones(1)} | weights if fails.startswith("it") else weights).items():
            yield name, tensor
            taken.append(name)

    with engine(checkpoints[0]) as llm:
        if fails == "the engine sleeps":
            llm.sleep()
        with pytest.raises(ValueError, match=r"no place|in_flight|sleeps"):
            llm.update_weights(received(), in_flight="later" if "mode" in fails else "wait")
    assert taken[-len(weights) :] == list(weights)


TRAINER = """
import sys
import torch.distributed as dist
from safetensors.torch import load_file
from folovllm.electives.rollouts.transfer import broadcast_weights

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=2)
broadcast_weights(load_file(sys.argv[2]))
dist.destroy_process_group()
"""


def test_another_process_sends_weights_over_gloo(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    import torch.distributed as dist

    from folovllm.electives.rollouts.transfer import receive_weights

    first, other = checkpoints
    with engine(other) as llm:
        expected = tokens(llm)
    meeting = tmp_path / "meeting"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(meeting), str(other / "model.safetensors")])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=1, world_size=2)
    try:
        with engine(first) as llm:
            llm.update_weights(receive_weights())
            assert tokens(llm) == expected
    finally:
        dist.destroy_process_group()
        assert trainer.wait(60) == 0
