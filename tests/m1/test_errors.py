"""Bad input gets one clear sentence before any work starts, and nothing else is lost."""

import json
import logging
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from folovllm import LLM, EngineConfig, SamplingParams
from folovllm.apps.cli import main
from folovllm.models.generation_defaults import generation_defaults
from tests.helpers import tiny_checkpoint
from tests.workloads import run_to_end

SHORT = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(tiny_checkpoint()), milestone="m1", use_tqdm=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that may be damaged."""
    shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    return tmp_path / "model"


NO_PROMPTS = (
    b"text", [b"text"], {"prompt": 5}, {"prompt": None}, {"prompt_token_ids": "text"}, None, 7, ["good", None]
)  # fmt: skip
NO_CONVERSATIONS = "Hello", {"role": "user", "content": "Hello"}, ["Hello"], [["Hello"]], [5], iter([])
REFUSED: list[tuple[Callable[[LLM], Any], str]] = [
    *(
        (partial(LLM.generate, prompts=prompt, sampling_params=SHORT, use_tqdm=False), says)
        for prompt, says in [
            ("", "prompt is empty"),
            ([[]], "prompt is empty"),
            (["good", ""], "prompt is empty"),
            ([1] * 512, "512 tokens.*context of 512.*shorten it"),
            ([1, 259], "token id 259.*0 to 258"),
            ([1, -1], "token id -1"),
            ([[1, 2.5]], "whole numbers"),
            ({"text": "text"}, "'text' in a prompt is not supported.*a string or a list of token ids"),
            ({"prompt": "text", "multi_modal_data": {"image": 1}}, "'multi_modal_data' in a prompt is not supported"),
            *((prompt, "a string or a list of token ids") for prompt in NO_PROMPTS),
            ("half a character: \ud83d", "not valid Unicode"),
        ]
    ),
    *(
        (partial(LLM.generate, prompts=["a", "b"], sampling_params=params, use_tqdm=False), says)
        for params, says in [
            ([SHORT] * 3, "3 sampling_params for 2 prompts"),
            *((params, "a SamplingParams, not") for params in ({"temperature": 0}, [{"temperature": 0}] * 2, "x", 5)),
            (SamplingParams(stop_token_ids=[259]), "stop_token_ids"),
            (SamplingParams(allowed_token_ids=[259]), "allowed_token_ids must lie between 0 and 258, and 259"),
            (SamplingParams(allowed_token_ids=[-1]), "allowed_token_ids must lie between 0 and 258, and -1"),
            (SamplingParams(logit_bias={259: 1.0}), "logit_bias must lie between 0 and 258, and 259"),
            (
                SamplingParams(allowed_token_ids=[64], bad_words=["a"]),
                "forbid all of allowed_token_ids: nothing could be",
            ),
            (
                SamplingParams(allowed_token_ids=[64], min_tokens=3, stop_token_ids=[64]),
                "forbid all of allowed_token_ids",
            ),
        ]
    ),
    *(
        (partial(LLM.chat, messages=no, use_tqdm=False), "conversation is a list of messages")
        for no in NO_CONVERSATIONS
    ),
    (lambda llm: llm.engine.add_request("r", "a", SHORT, priority="first"), "priority"),
    (lambda llm: llm.engine.add_request("r", "a", SHORT, cache_salt=5), "cache_salt"),
    (lambda llm: llm.engine.add_request("r", "a", SHORT, cache_salt="\ud800"), "cache_salt"),
    (lambda llm: llm.engine.abort_request("ghost"), "no request 'ghost'"),
]
TEMPLATE = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
HELLO = {"role": "user", "content": "Hello"}


class TestPrompts:
    @pytest.mark.parametrize(("call", "says"), REFUSED)
    def test_is_refused(self, llm: LLM, call: Callable[[LLM], Any], says: str) -> None:
        steps = llm.engine.stats().steps
        with pytest.raises(ValueError, match=says):
            call(llm)
        stats = llm.engine.stats()
        assert (stats.waiting, stats.running, stats.steps) == (0, 0, steps), "work had started"

    def test_a_long_prompt_gets_our_sentence_alone(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 4}))
        transformers_log = logging.getLogger("transformers")
        transformers_log.addHandler(caplog.handler)
        try:
            other = LLM(str(folder), milestone="m1", use_tqdm=False)
            with other, pytest.raises(ValueError, match="shorten it"):
                other.generate("x" * 600, SHORT, use_tqdm=False)
        finally:
            transformers_log.removeHandler(caplog.handler)
        assert "longer than" not in caplog.text

    def test_a_refused_request_does_not_disturb_the_running_one(self, llm: LLM) -> None:
        alone = llm.generate("Hello", SHORT, use_tqdm=False)[0]["token_ids"]
        llm.engine.add_request("good", "Hello", SHORT, stream=False)
        llm.engine.step()
        for bad in ("", [999]):
            with pytest.raises(ValueError):
                llm.engine.add_request("bad", bad, SHORT)
        with pytest.raises(ValueError, match="in use"):
            llm.engine.add_request("good", "again", SHORT)
        assert [o.outputs[0].token_ids for o in run_to_end(llm.engine)] == [alone]

    @pytest.mark.parametrize(("template", "message"), [
        *((TEMPLATE, m) for m in ({"role": "user"}, {"content": "Hello"}, {"role": "user", "content": 5})),
        ("{{ raise_exception('roles must alternate') }}", HELLO),
        ("{{ messages[0].tool.name }}", HELLO),
        ("{{ 1 // 0 }}", HELLO),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", HELLO),
        ("{{ ''.join([5]) }}", HELLO),
        ("{{ 'x' * 10 ** 15 }}", HELLO),
        ("{{ [].pop() }}", HELLO),
        ("{% for m in", HELLO),
    ])  # fmt: skip
    def test_what_the_chat_template_does_not_take(
        self, llm: LLM, template: str, message: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(llm.tokenizer, "chat_template", template)
        with pytest.raises(ValueError, match=r"template does not take this \(\w+Error.*\): a conversation") as caught:
            llm.chat([message], SHORT, use_tqdm=False)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("field", "values"), [
    ("temperature", [-0.1, float("nan"), float("inf"), 1e300, "hot", None]),
    ("top_p", [0.0, -1.0, 1.1, float("nan"), "0.9", None]),
    ("top_k", [-2, 2.5, 2**63, None]),
    ("min_p", [-0.1, 1.1, float("nan")]),
    ("max_tokens", [0, -1, 2.5]),
    ("min_tokens", [-1, 257, 10**30, None]),
    ("n", [0, -3, None, True]),
    ("seed", [-2, 2**63]),
    ("logprobs", [-1, 10**20]),
    ("stop", [[""], "", [1], 5, ["\ufffd"], "half \ufffd"]),
    ("stop_token_ids", [["a"], 5]),
    ("truncate_prompt_tokens", [0, -2, 1.5]),
    ("output_kind", ["DELTA", None]),
    ("repetition_penalty", [0.0, -1.0, float("nan"), float("inf"), 1e300, 1e-300]),
    ("presence_penalty", [float("nan"), 1e300, -2.1, "2"]),
    ("frequency_penalty", [float("inf"), 1e300, 2.1, None]),
    ("logit_bias", [[1], {True: 1}, {"1.5": 1}, {1: float("nan")}, {1: "2"}]),
    ("allowed_token_ids", [[], [1.0], 5]),
    ("bad_words", ["no", ["a", ""]]),
])  # fmt: skip
def test_sampling_params(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match={"stop": "stop string", "bad_words": "bad.word"}.get(field, field)):
            SamplingParams(**{field: value})


def test_sampling_params_at_the_ends_of_their_ranges() -> None:
    SamplingParams(temperature=0, top_k=-1, top_p=1.0, min_p=0.0, max_tokens=1, min_tokens=1, n=1, logprobs=0)
    SamplingParams(temperature=5, top_k=0, top_p=1e-6, min_p=1.0, max_tokens=None, min_tokens=9, seed=2**63 - 1)
    SamplingParams(presence_penalty=-2, frequency_penalty=2, repetition_penalty=100)
    assert (
        SamplingParams(temperature=1e-40).temperature == 0 < SamplingParams(temperature=0.01).temperature
    )  # logits over it: infinite
    assert SamplingParams(stop="x").stop == ["x"] and SamplingParams(bad_words=None).bad_words == []
    assert SamplingParams(logit_bias={"5": 2, 6: np.float32(1)}).logit_bias == {5: 2.0, 6: 1.0}
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert type(SamplingParams(repetition_penalty=Fraction(3, 2)).repetition_penalty) is float  # what a tensor takes


def test_the_strongest_penalties_and_the_highest_temperature_leave_the_logits_finite(llm: LLM) -> None:
    strong = SamplingParams(
        temperature=1e6, repetition_penalty=100, presence_penalty=2, frequency_penalty=-2, min_tokens=8, max_tokens=8
    )
    answer = llm.generate([[5] * 3], strong, use_tqdm=False)[0]["token_ids"]
    assert len(set(answer)) > 4 and not set(answer) & {256}, "a token that was forbidden, or the same all the time"


def test_no_name_is_not_the_folder_that_we_are_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match="a model has no name"):
        LLM("", milestone="m1", use_tqdm=False)


def test_a_name_that_is_nearly_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own message has several lines; ours has one, and the name that was meant before it."""

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("Got: ConnectError\nPlease check your connection")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ValueError, match=r"at 'stories5m' \(did you mean 'stories-5m'\?\).*ConnectError Please"):
        LLM("stories5m", use_tqdm=False)
    with pytest.raises(ValueError, match="at 'Qwen/none', and the"):
        LLM("Qwen/none", use_tqdm=False)


def test_small_files_are_read_before_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "generation_config.json").write_text("{")
    monkeypatch.setattr("folovllm.build.make_executor", lambda *_: pytest.fail("loads the model first"))
    with pytest.raises(ValueError, match=r"generation_config\.json"):
        LLM(str(folder), milestone="m1", use_tqdm=False)


NESTED = '{"a":' * 50_000 + "1" + "}" * 50_000
INDEX = "model.safetensors.index.json"
STRANGERS = "../other.safetensors", "/tmp/other.safetensors", "..", "sub/x.safetensors"  # files elsewhere stay closed
DAMAGED: dict[str, tuple[Any, ...]] = {  # by file: its text, or fields that are altered
    "config.json": (
        "5", NESTED, '{"model_type": "vit"}', "{", {"hidden_size": 2**70}, {"num_key_value_heads": 3},
        {"num_key_value_heads": -1}, {"num_hidden_layers": 2**30, "layer_types": None},
        {"head_dim": 2**40}, {"intermediate_size": 2**31}, {"hidden_size": 2**31 - 1},
        {"num_hidden_layers": 2**30}, {"rope_scaling": {"rope_type": "llama3", "factor": None}},
        {"intermediate_size": 2**30}, {"attention_dropout": "a"},
    ),
    "generation_config.json": ("{", "[]", NESTED, {"eos_token_id": "x"}),
    "tokenizer.json": ("[]", "{", "{}", {"added_tokens": 5}),
    "tokenizer_config.json": ("null", NESTED),
    "special_tokens_map.json": ("[]",),
    "added_tokens.json": ("[]",),
    INDEX: ("{", "{}", "[]", NESTED, {"weight_map": [1]}, {"weight_map": {"a": 5}}),
}  # fmt: skip
DAMAGES: list[tuple[str, Any, str | None]] = [  # a file, what is made of it, and what is said beside the folder's name
    ("", shutil.rmtree, "no model folder"),
    ("config.json", Path.unlink, "no config.json"),
    ("config.json", {"model_type": "nonsense"}, "cannot read the configuration"),
    (
        "config.json",
        {"model_type": "vit", "architectures": ["ViTModel"]},
        "no model for .* ViTModel.*Llama|Unrecognized conf",
    ),
    ("config.json", {"num_hidden_layers": 99}, "cannot read the configuration"),
    ("config.json", {"num_hidden_layers": 4, "layer_types": None}, "lacks model.layers.3"),
    ("tokenizer.json", Path.unlink, "no tokenizer"),
    ("model.safetensors", Path.unlink, "model.safetensors"),
    ("model.safetensors", lambda file: file.write_bytes(file.read_bytes()[:2000]), "cannot read|cannot load the model"),
    *((INDEX, {"weight_map": {"a": name}}, "must be the name of a file in the same folder") for name in STRANGERS),
    *((file, damage, None) for file, damages in DAMAGED.items() for damage in damages),
]


@pytest.mark.parametrize("model_impl", ["hf", "native"])
@pytest.mark.parametrize(("file", "damage", "says"), DAMAGES, ids=[f"{d[0]} {d[2] or d[1]}"[:60] for d in DAMAGES])
def test_damaged_models(folder: Path, file: str, damage: Any, says: str | None, model_impl: str) -> None:
    """Of JSON, one line that names the folder, with the library's own words."""
    path = folder / file
    if isinstance(damage, dict):
        damage = json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **damage})
    damage(path) if callable(damage) else path.write_text(damage)
    with pytest.raises(ValueError, match=says or re.escape(str(folder))) as caught:
        LLM(str(folder), milestone="m1", model_impl=model_impl, use_tqdm=False)
    assert says or ("\n" not in str(caught.value) and len(str(caught.value)) < 600)


def test_a_recommendation_that_no_request_may_have_is_named(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ValueError, match=r"generation_config\.json: .*top_p"):
        generation_defaults(folder)


@pytest.mark.parametrize(("command", "damage"), [
    (["generate", "hi"], "config.json"),
    (["generate", "hi"], "tokenizer.json"),
    (["generate", "hi"], "model.safetensors"),
    (["chat"], "model.safetensors"),
    pytest.param(["serve", "--port", "0"], "model.safetensors", marks=pytest.mark.x1),
    pytest.param(["inspect", "--no-browser"], "model.safetensors", marks=pytest.mark.x1),
])  # fmt: skip
def test_a_damaged_model_is_one_line_in_the_terminal(
    command: list[str], damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FOLOVLLM_MINE", raising=False)  # over a learner's code there is a traceback, too
    monkeypatch.setattr("webbrowser.open", lambda *_: None)
    (folder / damage).write_bytes((folder / damage).read_bytes()[:200])
    with pytest.raises(SystemExit) as caught:
        main([*command, "--milestone", "m1", "--device", "cpu", "--model", str(folder)])
    assert caught.value.code == 2
    error = capfd.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and str(folder) in error and (damage in error or damage != "config.json"), error


INT8, FP8 = torch.int8, torch.float8_e4m3fn


@pytest.mark.parametrize("model_impl", ["hf", "native"])
@pytest.mark.parametrize(("value", "stored", "dtype", "says"), [
    (0.0, INT8, "float32", "is stored as int8: quantized"),
    (0.0, FP8, "float32", "is stored as float8_e4m3fn: quantized"),
    (torch.nan, torch.float32, "float32", "holds NaN or infinity as float32"),
    (-torch.inf, torch.float32, "float32", "holds NaN or infinity as float32"),
    (1e6, torch.float32, "float16", "holds NaN or infinity as float16"),
])  # fmt: skip
def test_weights_that_are_codes_or_no_numbers(
    folder: Path, value: float, stored: torch.dtype, dtype: str, says: str, model_impl: str
) -> None:
    """Codes as floats would be off by a scale that nobody applied; of one NaN all logits would be NaN, and answers "!!!"."""
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = value
    save_file(tensors | {name: tensors[name].to(stored)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"layers.1.mlp.down_proj.weight' {says}"):
        LLM(str(folder), milestone="m1", model_impl=model_impl, dtype=dtype, use_tqdm=False)


def test_an_end_of_text_outside_the_vocabulary(folder: Path) -> None:
    """Nobody can draw it, so `min_tokens` need not forbid it."""
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 999999, -1]}')
    llm = LLM(str(folder), milestone="m1", model_impl="native", use_tqdm=False)
    assert llm.generate("a", SamplingParams(min_tokens=1, max_tokens=1), use_tqdm=False)[0].finished


@pytest.mark.parametrize(("fields", "says"), [
    ({"milestone": "m0"}, "unknown milestone 'm0': choose one of m1, m2"),
    ({"dtype": "int8"}, "unknown dtype 'int8'.*float32"),
    ({"model_impl": "jax"}, "unknown model_impl"),
    ({"max_num_seqs": 4}, "one request at a time"),
    ({"scheduling": "priority"}, "in the order of arrival"),
    ({"max_model_len": 1}, "max_model_len must be at least 2"),
    ({"max_model_len": 1.5}, "max_model_len must be at least 2 .a whole number"),
    ({"max_num_seqs": 2.0}, "max_num_seqs must be at least 1"),
    ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold must be at least 0"),
    ({"kv_cache_memory": None}, "kv_cache_memory must be at least 1"),
    ({"seed": None}, "seed must be between 0 and .*whole number"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": None}, "gpu_memory_utilization must be above 0 and at most 1"),
    *(({"num_threads": n}, "num_threads must be at least 1") for n in (0, -1, 1.5, True)),
    ({"milestone": ["m1"]}, "milestone must be a text"),
    *(({n: ""}, f"{n} is an empty text") for n in ("milestone", "tokenizer", "device", "attention_backend")),
    *(({name: ""}, f"unknown {name} ''") for name in ("dtype", "kv_cache_dtype", "kv_cache", "scheduling")),
    ({"model": 5}, "model must be a text"),
    ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be True or False, not 'no'"),
])  # fmt: skip
def test_config(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        EngineConfig(**{"milestone": "m1", **fields})


@pytest.mark.parametrize(("fields", "says"), [
    ({"max_model_len": 513}, "max_model_len 513 exceeds the model's context of 512"),
    ({"device": "tpu"}, "unknown device 'tpu'"),
    ({"tokenizer": "a" * 5000}, "no model folder at 'aaa"),
    ({"attention_backend": "nope"}, "leave attention_backend out, take .torch_naive"),
    ({"attention_backend": "torch_paged"}, "leave attention_backend out"),
])  # fmt: skip
@pytest.mark.parametrize("model_impl", ["hf", "native"])
def test_what_the_model_or_machine_cannot_give(fields: dict[str, Any], says: str, model_impl: str) -> None:
    with pytest.raises(ValueError, match=says):
        LLM(str(tiny_checkpoint()), milestone="m1", model_impl=model_impl, use_tqdm=False, **fields)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="no CUDA GPU here: use device='cpu'"):
        LLM(str(tiny_checkpoint()), milestone="m1", device="cuda", use_tqdm=False)


def test_bfloat16_is_refused_on_a_card_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself the engine takes float16 there; asked for bfloat16, it says what to do before any kernel is compiled."""
    from folovllm.engine.setup import choose_dtype

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    hf_config, card = SimpleNamespace(dtype=torch.bfloat16), torch.device("cuda")
    assert choose_dtype("auto", card, hf_config) == torch.float16
    with pytest.raises(ValueError, match=r"8\.0 or later, and Tesla T4 is older: use float16"):
        choose_dtype("bfloat16", card, hf_config)
    assert choose_dtype("bfloat16", torch.device("cpu"), hf_config) == torch.bfloat16
