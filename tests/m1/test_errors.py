"""Bad input gets one clear sentence before any work starts, and nothing else is lost."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from folovllm import LLM, EngineConfig, SamplingParams
from tests.helpers import tiny_checkpoint

SHORT = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny_checkpoint()), milestone="m1", use_tqdm=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that may be damaged."""
    shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompt", "says"),
        [
            ("", "prompt is empty"),
            ([[]], "prompt is empty"),
            ([1] * 512, "512 tokens.*context of 512.*shorten it"),
            ([1, 259], "token id 259.*0 to 258"),
            ([1, -1], "token id -1"),
            ([[1, 2.5]], "whole numbers"),
            (b"text", "a string or a list of token ids"),
            ([b"text"], "a string or a list of token ids"),
            ({"prompt": "text"}, "a string or a list of token ids"),
            (None, "a string or a list of token ids"),
            (7, "a string or a list of token ids"),
            (["good", None], "a string or a list of token ids"),
            ("half a character: \ud83d", "not valid Unicode"),
        ],
    )
    def test_is_refused(self, llm: LLM, prompt: Any, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            llm.generate(prompt, SHORT, use_tqdm=False)
        assert not llm.engine.has_unfinished_requests()

    def test_one_bad_prompt_leaves_no_trace_of_the_good_ones(self, llm: LLM) -> None:
        steps = llm.engine.stats().steps
        with pytest.raises(ValueError, match="empty"):
            llm.generate(["good", ""], SHORT, use_tqdm=False)
        stats = llm.engine.stats()
        assert (stats.waiting, stats.running, stats.steps) == (0, 0, steps), "work had started"

    def test_a_refused_request_does_not_disturb_the_running_one(self, llm: LLM) -> None:
        alone = llm.generate("Hello", SHORT, use_tqdm=False)[0]["token_ids"]
        llm.engine.add_request("good", "Hello", SHORT, stream=False)
        llm.engine.step()
        for bad in ("", [999]):
            with pytest.raises(ValueError):
                llm.engine.add_request("bad", bad, SHORT)
        with pytest.raises(ValueError, match="in use"):
            llm.engine.add_request("good", "again", SHORT)
        outputs = []
        while llm.engine.has_unfinished_requests():
            outputs += llm.engine.step()
        assert [o.outputs[0].token_ids for o in outputs] == [alone]

    def test_max_tokens_beyond_the_context_is_capped(self, llm: LLM) -> None:
        for max_tokens in (100, None):
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            out = llm.generate([5] * 500, params, use_tqdm=False)[0].outputs[0]
            assert len(out.token_ids) == 12 and out.finish_reason == "length"

    def test_numpy_ids_and_an_empty_list(self, llm: LLM) -> None:
        ids = np.array([5, 6, 7])
        outputs = [llm.generate(p, SHORT, use_tqdm=False)[0]["token_ids"] for p in (ids, list(ids), [5, 6, 7])]
        assert outputs[0] == outputs[1] == outputs[2]
        assert llm.generate([], SHORT, use_tqdm=False) == []

    def test_params_that_do_not_match_the_prompts(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
            llm.generate(["a", "b"], [SHORT] * 3, use_tqdm=False)

    @pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "x"])
    def test_params_of_another_kind(self, llm: LLM, params: Any) -> None:
        with pytest.raises(ValueError, match="a SamplingParams, not"):
            llm.generate("a", params, use_tqdm=False)

    @pytest.mark.parametrize("field", [{"priority": "first"}, {"cache_salt": 5}, {"cache_salt": "\ud800"}])
    def test_other_fields_of_another_kind(self, llm: LLM, field: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(field))):
            llm.engine.add_request("r", "a", SHORT, **field)
        assert not llm.engine.has_request("r")

    @pytest.mark.parametrize(
        "messages", ["Hello", {"role": "user", "content": "Hello"}, ["Hello"], [["Hello"]], [5], iter([])]
    )
    def test_what_is_no_conversation(self, llm: LLM, messages: Any) -> None:
        with pytest.raises(ValueError, match="a conversation is a list of messages"):
            llm.chat(messages, SHORT, use_tqdm=False)

    @pytest.mark.parametrize("message", [{"role": "user"}, {"content": "Hello"}, {"role": "user", "content": 5}])
    def test_what_the_chat_template_does_not_take(
        self, llm: LLM, message: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        template = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match=r"template does not take this .* a conversation is a list of messages"):
            llm.chat([message], SHORT, use_tqdm=False)

    def test_a_conversation_with_half_a_character(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="not valid Unicode"):
            llm.chat([{"role": "user", "content": "\ud83d"}], SHORT, use_tqdm=False)

    def test_a_stop_token_outside_the_vocabulary(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="stop_token_ids"):
            llm.generate("a", SamplingParams(stop_token_ids=[259]), use_tqdm=False)

    def test_aborting_what_is_not_there(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="no request 'ghost'"):
            llm.engine.abort_request("ghost")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, float("nan"), float("inf"), 1e300, "hot", None]),
        ("top_p", [0.0, -1.0, 1.1, float("nan"), "0.9", None]),
        ("top_k", [-2, 2.5, 2**63, None]),
        ("min_p", [-0.1, 1.1, float("nan")]),
        ("max_tokens", [0, -1, 2.5]),
        ("min_tokens", [-1, 257, 10**30, None]),
        ("n", [0, -3, None]),
        ("seed", [-1, 2**63]),
        ("logprobs", [-1, 10**20]),
        ("stop", [[""], "", [1], None]),
        ("stop_token_ids", [["a"], None]),
        ("repetition_penalty", [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300]),
        ("presence_penalty", [float("nan"), 1e300, -2.1, "2"]),
        ("frequency_penalty", [float("inf"), 1e300, 2.1, None]),
    ],
)
def test_sampling_params(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=field if field != "stop" else "stop string"):
            SamplingParams(**{field: value})


def test_sampling_params_at_the_ends_of_their_ranges() -> None:
    SamplingParams(temperature=0, top_k=-1, top_p=1.0, min_p=0.0, max_tokens=1, min_tokens=1, n=1, logprobs=0)
    SamplingParams(temperature=5, top_k=0, top_p=1e-6, min_p=1.0, max_tokens=None, min_tokens=9, seed=2**63 - 1)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=100)
    assert SamplingParams(stop="x").stop == ["x"]
    assert type(SamplingParams(repetition_penalty=Fraction(3, 2)).repetition_penalty) is float  # what a tensor takes


def test_the_strongest_penalties_and_the_highest_temperature_leave_the_logits_finite(llm: LLM) -> None:
    strong = SamplingParams(
        temperature=1e6, repetition_penalty=100, presence_penalty=2, frequency_penalty=-2, min_tokens=8, max_tokens=8
    )
    answer = llm.generate([[5] * 3], strong, use_tqdm=False)[0]["token_ids"]
    assert len(set(answer)) > 4 and not set(answer) & {256}, "a token that was forbidden, or the same all the time"


def test_a_temperature_near_0_is_greedy() -> None:
    """Logits over 1e-40 would all be infinite, and the first of them no better than any other."""
    assert SamplingParams(temperature=1e-40).greedy and not SamplingParams(temperature=0.01).greedy


BROKEN: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no folder", shutil.rmtree, "no model folder"),
    ("no config", lambda p: (p / "config.json").unlink(), "no config.json"),
    ("config is no JSON", lambda p: (p / "config.json").write_text("{"), "cannot read the configuration"),
    ("unknown kind", lambda p: edit_config(p, model_type="nonsense"), "cannot read the configuration"),
    (
        "unsupported architecture",
        lambda p: edit_config(p, model_type="vit", architectures=["ViTModel"]),
        "no model for architecture ViTModel.*LlamaForCausalLM|Unrecognized configuration class",
    ),
    ("config contradicts itself", lambda p: edit_config(p, num_hidden_layers=99), "cannot read the configuration"),
    ("damaged generation config", lambda p: (p / "generation_config.json").write_text("{"), "generation_config.json"),
    ("config is a list", lambda p: (p / "config.json").write_text("[]"), "cannot read the configuration"),
    (
        "generation config is a list",
        lambda p: (p / "generation_config.json").write_text("[]"),
        "generation_config.json",
    ),
    ("no number ends it", lambda p: edit_config(p, eos_token_id=["x"]), "eos_token_id|cannot read the configuration"),
    ("no tokenizer", lambda p: (p / "tokenizer.json").unlink(), "no tokenizer"),
    ("damaged tokenizer", lambda p: (p / "tokenizer.json").write_text("{"), "cannot read the tokenizer"),
    ("no weights", lambda p: (p / "model.safetensors").unlink(), "model.safetensors"),
    ("truncated weights", truncate, "damaged or incomplete|cannot load the model"),
    ("weights are missing", lambda p: edit_config(p, num_hidden_layers=4, layer_types=None), "lacks model.layers.3"),
    (
        "a pickle in their place",
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "model.safetensors|safetensors",
    ),
]


@pytest.mark.parametrize("model_impl", ["hf", "native"])
@pytest.mark.parametrize(("damage", "says"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_broken_models(folder: Path, damage: Callable[[Path], Any], says: str, model_impl: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=says):
        LLM(str(folder), milestone="m1", model_impl=model_impl, use_tqdm=False)


def test_small_files_are_read_before_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "generation_config.json").write_text("{")
    monkeypatch.setattr("folovllm.build.make_executor", lambda _: pytest.fail("loads the model first"))
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        LLM(str(folder), milestone="m1", use_tqdm=False)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("model_impl", ["hf", "native"])
@pytest.mark.parametrize(
    ("name", "size", "says"),
    [
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_attention_heads", -4, "num_attention_heads is -4"),
        ("num_key_value_heads", 0, "num_key_value_heads is 0"),
        ("num_key_value_heads", 3, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("hidden_size", 0, "hidden_size is 0"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("vocab_size", 0, "vocab_size is 0"),
        ("head_dim", 0, "head_dim is 0"),
        ("max_position_embeddings", 0, "max_position_embeddings is 0"),
    ],
)
def test_sizes_that_no_model_has(tmp_path: Path, family: str, model_impl: str, name: str, size: int, says: str) -> None:
    shutil.copytree(tiny_checkpoint(family), tmp_path / "model")
    edit_config(tmp_path / "model", **{name: size})
    with pytest.raises(ValueError, match=f"cannot read the configuration.*{says}"):
        LLM(str(tmp_path / "model"), milestone="m1", model_impl=model_impl, use_tqdm=False)


@pytest.mark.parametrize("index", ["{", "{}"])
def test_a_damaged_index(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        LLM(str(folder), milestone="m1", model_impl="native", use_tqdm=False)


def test_an_end_of_text_outside_the_vocabulary(folder: Path) -> None:
    """Nobody can draw it, so `min_tokens` need not forbid it."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 999999, -1]}')
    llm = LLM(str(folder), milestone="m1", model_impl="native", use_tqdm=False)
    assert llm.generate("a", SamplingParams(min_tokens=1, max_tokens=1), use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"milestone": "m0"}, "unknown milestone 'm0': choose one of m1, m2"),
        ({"dtype": "int8"}, "unknown dtype 'int8'.*float32"),
        ({"model_impl": "jax"}, "unknown model_impl"),
        ({"max_num_seqs": 4}, "one request at a time"),
        ({"scheduling": "priority"}, "in the order of arrival"),
        ({"max_model_len": 0}, "max_model_len must be at least 2"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"max_model_len": 1.5}, "max_model_len must be at least 2 .a whole number"),
        ({"max_num_seqs": 2.0}, "max_num_seqs must be at least 1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0"),
        ({"kv_cache_memory": None}, "kv_cache_memory must be at least 1"),
        ({"seed": None}, "seed must be a whole number"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"kv_cache_memory": 0}, "kv_cache_memory"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number"),
        ({"gpu_memory_utilization": None}, "gpu_memory_utilization must be a number"),
        ({"milestone": ["m1"]}, "milestone must be a text"),
        ({"model": 5}, "model must be a text"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, not 'no'"),
        ({"max_num_seqs": True}, "max_num_seqs must be at least 1"),
    ],
)
def test_config(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(**{"milestone": "m1", **fields})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_model_len": 513}, "max_model_len 513 exceeds the model's context of 512"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"attention_backend": "nope"}, "unknown attention_backend 'nope': choose one of.*torch_naive"),
        ({"attention_backend": "torch_naive"}, "leave attention_backend out"),
    ],
)
@pytest.mark.parametrize("model_impl", ["hf", "native"])
def test_what_the_model_or_machine_cannot_give(fields: dict[str, Any], says: str, model_impl: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM(str(tiny_checkpoint()), milestone="m1", model_impl=model_impl, use_tqdm=False, **fields)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="no CUDA GPU here: use device='cpu'"):
        LLM(str(tiny_checkpoint()), milestone="m1", device="cuda", use_tqdm=False)
