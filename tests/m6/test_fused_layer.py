"""Decoder layers that fold their norms away: what they compute, how exactly, and what they leave behind."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

pytest.importorskip("triton", reason="Triton is for Linux only")

from folovllm.attention.backends.torch_naive import reshape_and_cache_kv
from folovllm.attention.backends.triton import TritonBackend
from folovllm.config import EngineConfig
from folovllm.distributed.sharding import local_config, shard_named
from folovllm.engine.llm_engine import LLMEngine, make_engine
from folovllm.kernels.skinny_linear import is_supported
from folovllm.layers.activation import SiluAndMul
from folovllm.layers.embed_head import ParallelLMHead
from folovllm.layers.layer_set import LayerSet
from folovllm.layers.rotary_embedding import rotate
from folovllm.layers.sharded import sharded
from folovllm.models import fused, fused_layer
from folovllm.models.fused_layer import DeferredNormDecoderLayer, skinny_layers
from folovllm.models.llama import LlamaDecoderLayer
from folovllm.models.loader import load_model
from folovllm.models.model_config import head_dim_of
from folovllm.models.registry import build_model
from folovllm.sampling_params import SamplingParams
from tests.contract import DEVICE
from tests.helpers import Driver, assert_as_accurate, assert_logits_equal, hf_logits, prompts, tiny_checkpoint
from tests.m6.ranks import ThreadGroup, on_ranks
from tests.workloads import Request, Workload, answered, serve


def small_checkpoint(family: str = "qwen3", **fields: Any) -> Path:
    """So small that the interpreter serves it in seconds. No width but the heads' is a power of two, where that can be."""
    hidden = 32 if family == "qwen2" else 24
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "hidden_size": hidden, "intermediate_size": 20}
    return tiny_checkpoint(family, **(shape | {"num_hidden_layers": 2} | fields))


@pytest.fixture
def gpu_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python chooses as on a GPU: every kernel of a captured step runs, interpreted where none can be compiled."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
        monkeypatch.setattr(fused_layer, "can_use_skinny", lambda *_: False)  # a head of 130 programs takes too long


@pytest.fixture(params=["few", "many"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of a layer's two ways is taken: small batches in `skinny_linear`, wherever it serves them, or none."""
    few = request.param == "few"
    monkeypatch.setattr(fused, "can_use_skinny", lambda x, weight: few and is_supported(len(x), weight))
    return request.param


def late_driver(checkpoint: Path, **fields: Any) -> Driver:
    """A model with the layers of M6, driven by hand."""
    return Driver(checkpoint, "torch_paged", device=DEVICE, layers=m6_layers(checkpoint), **fields)


def m6_layers(checkpoint: Path) -> LayerSet:
    return skinny_layers(head_dim_of(AutoConfig.from_pretrained(checkpoint)))


def late_layers(driver: Driver) -> list[DeferredNormDecoderLayer]:
    return [layer for layer in driver.model.model.layers if isinstance(layer, DeferredNormDecoderLayer)]


def take_weights(driver: Driver, other: Driver) -> None:
    """The weights of another driver's model, as if a checkpoint had held them."""
    driver.model.load_state_dict(other.model.state_dict())
    driver.model.weights_loaded()


def assert_same_step(one: Driver, other: Driver, pieces: dict[int, list[int]]) -> None:
    expected = other.step(pieces)
    for seq, logits in one.step(pieces).items():
        assert_logits_equal(logits, expected[seq])


# --- the whole engine -----------------------------------------------------------------------------------------------


def requests_of_all_kinds() -> list[Request]:
    """Greedy and seeded; a prompt longer than the budget, one of one token, and one that begins as the first does."""
    first, long, short = prompts([9, 14, 1])
    drawn = SamplingParams(temperature=0.8, seed=7, max_tokens=4, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    return [Request(first, drawn), Request(long, greedy), Request(short, greedy), Request([*first[:8], 3], drawn)]


def served_by_kernels(checkpoint: Path, **overrides: Any) -> LLMEngine:
    """M6 over kernels. Few blocks, so that sequences push each other out, and prompts come in chunks."""
    fields = {"max_model_len": 32, "max_num_seqs": 4, "max_num_batched_tokens": 10, "block_size": 4, "num_kv_blocks": 8}
    fields |= {"attention_backend": "triton", "dtype": "float32", "device": DEVICE, "use_tqdm": False}
    return make_engine(EngineConfig(model=str(checkpoint), **(fields | overrides)))


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "phi3"])  # norms of heads; biases; neither, and merged weights
def test_the_engine_answers_as_m1_does(family: str, gpu_paths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-3's last layer leaves tokens out at every step that has a prompt."""
    load = _answered(small_checkpoint(family, num_hidden_layers=1))
    monkeypatch.setattr(fused_layer, "MANY", 1 if family == "phi3" else fused_layer.MANY)
    last_tokens, lengths = fused_layer.last_tokens, set[int]()
    monkeypatch.setattr(fused_layer, "last_tokens", lambda batch: lengths.add(batch.num_seqs) or last_tokens(batch))
    widths: set[int] = set()
    for module, name in ((fused_layer, "silu_and_mul"), (fused, "skinny_linear")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda x, *rest, k=kernel, **kw: widths.add(len(x)) or k(x, *rest, **kw))
    served = served_by_kernels(load.model)
    load.check(serve(served, load.requests))
    assert served.stats().preemptions > 0 and served.prefix_cache_stats().tokens_hit > 0
    assert {1, 2, 4} <= widths and (2 in lengths) is (family == "phi3")
    if family == "qwen3":  # Qwen2's layers keep their norms, and have their activation elsewhere
        assert max(widths) > 4


def test_no_kernel_stores_what_another_sequence_reads_in_it(gpu_paths: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have one new token, and the second begins with the block that the first fills in this very step."""
    calls: list[int] = []
    raw = TritonBackend.forward_raw
    monkeypatch.setattr(TritonBackend, "forward_raw", lambda *args: calls.append(args[-1].num_seqs) or raw(*args))
    served = served_by_kernels(small_checkpoint(num_hidden_layers=1), num_kv_blocks=16, async_scheduling=False)
    greedy = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    alone = served.generate([5, 6, 7], greedy).outputs[0].token_ids
    prompt = [5, 6, 7, alone[0], 9]
    beside = served.generate(prompt, greedy).outputs[0].token_ids
    served.reset_prefix_cache()
    calls.clear()
    served.add_request("first", [5, 6, 7], greedy)
    served.step()
    served.add_request("second", prompt, greedy)
    outputs = served.step()
    first, second = served.scheduler.running
    assert (second.num_cached_tokens, second.block_table[0]) == (4, first.block_table[0])
    assert not calls
    outputs += served.step()
    if DEVICE == "cpu":  # on a GPU a graph replays it
        assert 2 in calls, "both run now, each in blocks of its own"
    while served.has_unfinished_requests():
        outputs += served.step()
    answers = {output.request_id: output.outputs[0].token_ids for output in outputs if output.finished}
    assert answers == {"first": alone, "second": beside}


def _answered(checkpoint: Path) -> Workload:
    """M1's answers, computed without the fixture's pretence."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            patch.setattr(torch.Tensor, "is_cuda", property(lambda _: False))
        return answered(checkpoint, requests_of_all_kinds())


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_the_head_is_a_product_for_few_tokens(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the library's for others; both write where the step's logits are."""
    taken: list[int] = []
    head = skinny_layers(16).make(ParallelLMHead, 10, 24).to(DEVICE)
    monkeypatch.setattr(fused_layer, "can_use_skinny", lambda x, weight: is_supported(len(x), weight))
    run = fused_layer.skinny_linear
    monkeypatch.setattr(fused_layer, "skinny_linear", lambda x, *rest, **k: taken.append(len(x)) or run(x, *rest, **k))
    head.weight.data.copy_(torch.randn(10, 24))
    hidden = torch.randn(tokens, 24).to(DEVICE)
    out = torch.full((tokens, 10), torch.nan, device=DEVICE)
    with torch.inference_mode():
        logits = head(hidden, out)
    assert logits.data_ptr() == out.data_ptr() and torch.allclose(out, hidden @ head.weight.T, atol=1e-5)
    assert taken == ([] if tokens == 3 else [tokens])


# --- the layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-12, 1e6])
def test_hostile_weights_and_streams(path: str, scale: float) -> None:
    """Weights of a norm that are zero, negative or huge; a row of zeros; a stream so small that only eps counts, or huge."""
    checkpoint = small_checkpoint(tied=False)
    plain, late = Driver(checkpoint, "torch_paged", device=DEVICE), late_driver(checkpoint)
    embedding = plain.model.model.embed_tokens.weight
    embedding *= scale
    embedding[0] = 0.0
    for layer in plain.model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight[:4] = torch.tensor([0.0, -1.0, -30.0, 100.0], device=DEVICE)
    take_weights(late, plain)
    for pieces in ({0: [1, 0, 3]}, {0: [0], 1: [0]}, {0: [4]}):
        assert_same_step(late, plain, pieces)


def test_in_float16_norms_stay(path: str) -> None:
    checkpoint, tokens = small_checkpoint(tied=False), prompts([4])[0]
    late = late_driver(checkpoint, dtype=torch.float16)
    assert not any(layer.folded for layer in late_layers(late))
    logits = late.step({0: tokens})[0]
    assert_as_accurate(logits, hf_logits(checkpoint, tokens, torch.float16), hf_logits(checkpoint, tokens))


def test_folding_twice_is_folding_once_and_what_is_saved_is_a_model() -> None:
    """And weights that are loaded later are folded again."""
    checkpoint, tokens = small_checkpoint(), prompts([6])[0]
    late, expected = late_driver(checkpoint), hf_logits(checkpoint, tokens)
    late.model.weights_loaded()
    assert_logits_equal(late.step({0: tokens})[0], expected)
    plain = Driver(checkpoint, "torch_paged", device=DEVICE)  # the file has not changed with the model
    assert_logits_equal(plain.step({0: tokens})[0], expected)
    plain.model.load_state_dict(late.model.state_dict())  # another norm and another projection: the same product
    assert_logits_equal(plain.step({1: tokens})[1], expected)
    load_model(late.model, checkpoint, use_tqdm=False)
    assert_logits_equal(late.step({1: tokens})[1], expected)


@pytest.mark.parametrize(("family", "fields", "folded", "path"), [
    ("qwen3", {}, True, "few"),
    ("qwen3", {}, True, "many"),
    ("mistral", {}, True, "few"),
    ("phi3", {}, True, "few"),
    ("qwen2", {}, False, "few"),
    ("qwen2", {}, False, "many"),
    ("llama", {"mlp_bias": True}, False, "few"),
    ("llama", {"attention_bias": True}, False, "few"),
    ("qwen3", {"head_dim": 24}, False, "few"),  # attention is torch's: no tile is 24 wide
], indirect=["path"])  # fmt: skip
def test_who_folds(family: str, fields: dict[str, Any], folded: bool, path: str) -> None:
    """All layers of a model do, or none. The answers are the same: of a prompt, of 1, 2 and 3 decodes, and beside a prompt."""
    checkpoint = small_checkpoint(family, **fields)
    plain, late = Driver(checkpoint, "torch_paged", device=DEVICE), late_driver(checkpoint)
    assert [layer.folded for layer in late_layers(late)] == [folded] * 2
    for pieces in ({0: [1, 2, 3]}, {0: [6]}, {0: [7], 1: [8, 9, 1]}, {0: [1], 1: [2]}, {0: [3], 1: [4], 2: [5]}):
        assert_same_step(late, plain, pieces)


# --- bfloat16, which the interpreter lacks: the same layers over torch ---------------------------------------------


def divided(x: torch.Tensor, stream: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The late division: rows of `x` by the root mean square of the stream's, rounded."""
    if stream is None:
        return x
    root = (stream.float().square().mean(1) + eps).sqrt()
    return (x.float() / root.view(-1, *[1] * (x.dim() - 1))).to(x.dtype)


def torch_linear(x, weight, norm_eps=None, gated=False, residual=None):
    """`skinny_linear`: float32 until the result, but for gate and up."""
    y = F.linear(x.float(), weight.float())
    y = y if norm_eps is None else divided(y, x, norm_eps)
    y = SiluAndMul()(y.to(x.dtype)).float() if gated else y
    return (y if residual is None else y + residual).to(x.dtype)


def torch_store(query, key, value, positions, kv_cache, slots, preparation, stream=None, stream_eps=0.0):
    """`qk_norm_rope_store`."""
    query, key, value = (divided(x, stream, stream_eps) for x in (query, key, value))
    weights, eps = (preparation.q_weight, preparation.k_weight), preparation.eps
    if preparation.q_weight is not None:
        query, key = (torch_norm(x, weight, eps) for x, weight in zip((query, key), weights, strict=True))
    cos, sin = preparation.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    reshape_and_cache_kv(rotate(key, cos, sin), value, kv_cache, slots)
    return rotate(query, cos, sin)


def torch_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype) * weight


@pytest.fixture
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel of the layers by torch, with the same roundings."""
    monkeypatch.setattr(fused, "qk_norm_rope_store", torch_store)
    monkeypatch.setattr(fused, "rms_norm", torch_norm)
    monkeypatch.setattr(fused, "add_rms_norm", lambda x, r, w, eps: (torch_norm(x + r, w, eps), x + r))
    monkeypatch.setattr(fused, "silu_and_mul", SiluAndMul())
    monkeypatch.setattr(fused_layer, "silu_and_mul", lambda x, stream, eps: SiluAndMul()(divided(x, stream, eps)))
    monkeypatch.setattr(fused, "skinny_linear", torch_linear)


@pytest.mark.parametrize("has_buffers", [False, True])
def test_two_ranks_leave_the_same_stream_as_one(
    in_torch: None, path: str, has_buffers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their norms are folded, and what each computes from its heads joins the stream once, on both to the last bit."""
    checkpoint, together = small_checkpoint(), []
    config = AutoConfig.from_pretrained(checkpoint)
    whole = late_layers(late_driver(checkpoint))[1]

    def summed(x: torch.Tensor, weight: torch.Tensor, group: ThreadGroup, residual: torch.Tensor) -> torch.Tensor:
        together.append(len(x))
        return group.all_reduce(F.linear(x, weight)) + residual

    monkeypatch.setattr(fused, "summed_linear", summed)
    generator = torch.Generator().manual_seed(0)
    steps = [(torch.randn(n, 24, generator=generator), torch.randn(n, 2, 16, generator=generator)) for n in (1, 2, 3)]

    def work(group: ThreadGroup) -> list[torch.Tensor]:
        group.one_shot_buffers = group if has_buffers else None
        layers = sharded(m6_layers(checkpoint), group, config.vocab_size)
        model = build_model(local_config(config, 2), torch.float32, DEVICE, layers=layers)
        load_model(model, checkpoint, use_tqdm=False, shard=partial(shard_named, head_dim=16, rank=group.rank, size=2))
        layer = model.model.layers[1]
        assert isinstance(layer, DeferredNormDecoderLayer) and layer.folded
        return [layer.after_attention(x.to(DEVICE, copy=True), a[:, [group.rank]].to(DEVICE)) for x, a in steps]

    with torch.inference_mode():
        first, second = on_ranks(2, work)
        for ours, theirs, (x, attended) in zip(first, second, steps, strict=True):
            assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, whole.after_attention(x.to(DEVICE, copy=True), attended.to(DEVICE)))
    assert sorted(together) == ([1] * 4 + [2] * 4 if has_buffers and path == "few" else [])  # two ranks, two products


@pytest.mark.parametrize("outliers", [False, True])
def test_in_bfloat16_as_accurate_as_with_its_norms(in_torch: None, path: str, outliers: bool) -> None:
    """The weights lose a digit in folding, once; a norm before the product would have cost it at every step.

    With a few activations a thousand times as large as the others, which trained models have, and small weights there.
    """
    checkpoint = tiny_checkpoint("qwen3", tied=False, num_hidden_layers=4)
    kinds = torch.float32, torch.bfloat16
    truth_driver, early = (Driver(checkpoint, "torch_paged", dtype=dtype, device=DEVICE) for dtype in kinds)
    late = late_driver(checkpoint, dtype=torch.bfloat16)
    for driver in (truth_driver, early) if outliers else ():
        driver.model.model.embed_tokens.weight[:, 5:8] *= 1024
        for layer in driver.model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[5:8] /= 1024
                norm.weight *= 16
    take_weights(late, early)
    assert all(layer.folded for layer in late_layers(late)) and type(early.model.model.layers[0]) is LlamaDecoderLayer
    results: list[list[torch.Tensor]] = [[], [], []]
    tokens = prompts([48])[0]
    for start in range(0, 48, 4):  # four tokens: those that both ways take
        for driver, logits in zip((truth_driver, early, late), results, strict=True):
            logits.append(driver.step({0: tokens[start : start + 4]})[0])
    truth, rival, ours = (torch.cat(logits) for logits in results)
    assert_as_accurate(ours, rival, truth)
    if not outliers:
        assert_as_accurate(ours, hf_logits(checkpoint, tokens, torch.bfloat16), hf_logits(checkpoint, tokens))
