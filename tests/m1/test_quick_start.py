"""What is read without transformers is what transformers reads; and a start imports no more than it needs."""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, Qwen3Config

from folovllm.models.files import (
    ASSETS,
    QWENS_WORDS,
    TOKENIZER_FILES,
    PlainConfig,
    QuickTokenizer,
    plain_config,
    quick_tokenizer,
)

EMBEDDED = ASSETS / "stories-5m"
TEXTS = [
    "",
    " ",
    "Lily's red kite, 12 345!",
    "<|im_start|>user\nHi<|im_end|>",
    "e\u0301\u4f60\u597d \U0001f600\r\n\t  x",
]
READ = (
    "architectures", "attention_bias", "bos_token_id", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size",
    "intermediate_size", "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "vocab_size",
)  # fmt: skip
BESIDE = {
    "architectures": ["Any"],
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}


@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
@pytest.mark.parametrize("old", [False, True], ids=["transformers 5", "transformers 4"])
def test_a_plain_config_says_what_transformers_reads(kind, old: bool, tmp_path: Path) -> None:
    fields = kind(**BESIDE).to_dict()
    if old:
        fields |= {"rope_theta": fields.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    plain, whole = plain_config(fields), AutoConfig.from_pretrained(tmp_path)
    assert plain is not None, "all is said"
    assert {name: plain.to_dict()[name] for name in READ} == {name: whole.to_dict()[name] for name in READ}


@pytest.mark.parametrize("changed", [
    {"model_type": "qwen2"}, {"head_dim": None}, SLIDING, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, {"hidden_size": 257},
    {"layer_types": ["sliding_attention"]}, {"quantization_config": {"quant_method": "fp8"}},
])  # fmt: skip
def test_what_follows_a_rule_is_left_to_transformers(changed: dict) -> None:
    fields = json.loads((EMBEDDED / "config.json").read_text())
    assert isinstance(plain_config(fields), PlainConfig)
    assert plain_config(fields | changed) is None


@pytest.fixture
def qwens(tmp_path: Path) -> Path:
    """The embedded model's vocabulary as a checkpoint of Qwen's has it."""
    shutil.copy(EMBEDDED / "config.json", tmp_path)
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex(QWENS_WORDS), behavior="isolated", invert=False)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.Sequence([split, as_bytes]), normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    change(tmp_path, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", "unk_token": None})
    return tmp_path


def quick_of(where: Path) -> QuickTokenizer | None:
    """As `load_tokenizer` finds it."""
    files = [where / name for name in TOKENIZER_FILES]
    return quick_tokenizer(where, {file.name: json.loads(file.read_text()) for file in files if file.is_file()})


def change(folder: Path, name: str, fields: dict) -> None:
    said = json.loads((EMBEDDED / name).read_text())
    (folder / name).write_text(json.dumps(said | fields))


@pytest.mark.parametrize("folder", ["embedded", "qwens"])
def test_encodes_and_decodes_as_transformers_does(folder: str, qwens: Path) -> None:
    where = qwens if folder == "qwens" else EMBEDDED
    quick, whole = quick_of(where), AutoTokenizer.from_pretrained(where)
    assert quick is not None
    assert type(quick.whole) is type(whole), "the class that AutoTokenizer takes"
    assert quick.eos_token_id == whole.eos_token_id
    for text in TEXTS:
        ids = whole.encode(text)
        assert quick.encode(text) == ids
        for skip in (False, True):
            assert quick.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)
    assert len(quick) == len(whole) and quick("Lily").input_ids == whole("Lily").input_ids
    assert quick.chat_template == whole.chat_template, "what it has not itself is transformers'"


@pytest.mark.parametrize("changed", [
    {"tokenizer_class": "LlamaTokenizer"}, {"add_bos_token": True}, {"clean_up_tokenization_spaces": True},
    {"eos_token": "<new>"}, {"tokenizer_class": None}, {"additional_special_tokens": ["the"]},
    {"added_tokens_decoder": {"2": {"content": "<|im_end|>", "special": False}}}, {"added_tokens_decoder": {}},
    {"extra_special_tokens": {"<|im_end|>": "the"}}, {"model_specific_special_tokens": {"image_token": "the"}},
])  # fmt: skip
def test_a_tokenizer_that_transformers_changes_is_left_to_it(changed: dict, qwens: Path) -> None:
    assert isinstance(quick_of(qwens), QuickTokenizer)
    change(qwens, "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", **changed})
    assert quick_of(qwens) is None


def test_where_the_files_name_no_end_it_is_qwens(qwens: Path) -> None:
    fields = json.loads((qwens / "tokenizer_config.json").read_text())
    del fields["eos_token"]
    (qwens / "tokenizer_config.json").write_text(json.dumps(fields))
    assert quick_of(qwens).eos_token_id == AutoTokenizer.from_pretrained(qwens).eos_token_id == 0


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Or a server's answers would stop. One try of many must show it: a busy machine may leave a thread no turn."""
    quick, text = quick_of(EMBEDDED), "Lily has a red kite. " * 4000

    def turns() -> int:
        with ThreadPoolExecutor(1) as threads:
            encoding = threads.submit(quick.encode, text)
            return sum(1 for _ in iter(lambda: time.sleep(0.001) or encoding.done(), True))

    assert any(turns() > 9 for _ in range(50))


def test_files_that_transformers_cannot_read_are_named(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    quick = quick_of(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="cannot read the tokenizer in"):
        quick.chat_template  # noqa: B018


@pytest.mark.parametrize("changed", [
    {"normalizer": None}, {"pre_tokenizer": None}, {"truncation": {"max_length": 4}},
    {"post_processor": {"type": "TemplateProcessing"}},
])  # fmt: skip
def test_so_is_one_that_is_not_qwens_but_says_so(changed: dict, qwens: Path) -> None:
    content = json.loads((qwens / "tokenizer.json").read_text())
    (qwens / "tokenizer.json").write_text(json.dumps(content | changed))
    assert quick_of(qwens) is None
