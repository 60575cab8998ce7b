"""The embedded models start without transformers: the same configuration, the same tokens."""

import logging
import subprocess
import sys
import threading

import pytest
from transformers import AutoConfig, AutoTokenizer

from folovllm import EngineConfig
from folovllm.models.files import ASSETS, full_tokenizer, load_hf_config, load_tokenizer
from folovllm.models.quick_start import PlainConfig, QuickTokenizer

STORIES = ASSETS / "stories-5m"
TEXTS = (
    "", "Once upon a time", "  two  spaces\n\nand lines", "caf\u00e9 \u2615 \U0001f600",
    "<|im_start|>user\nHi<|im_end|>", "a" * 500,
)  # fmt: skip


@pytest.mark.parametrize("name", ["stories-5m", "stories-draft"])
def test_the_configuration_says_what_transformers_reads(name: str) -> None:
    plain = load_hf_config(ASSETS / name, EngineConfig(model_impl="native"))
    whole = AutoConfig.from_pretrained(ASSETS / name)
    assert isinstance(plain, PlainConfig)
    assert all(
        getattr(whole, field) == value
        for field, value in plain.to_dict().items()
        if hasattr(whole, field) and "dtype" not in field
    )


def test_the_tokenizer_encodes_and_decodes_as_transformers_does() -> None:
    quick, whole = load_tokenizer(STORIES, EngineConfig()), AutoTokenizer.from_pretrained(STORIES)
    assert isinstance(quick, QuickTokenizer)
    assert quick.eos_token_id == whole.eos_token_id and len(quick) == len(whole)
    for text in TEXTS:
        ids = whole.encode(text)
        assert quick.encode(text) == ids
        for skip in (False, True):
            assert quick.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)
    assert quick.all_special_tokens == whole.all_special_tokens, "what it does not know transformers' tokenizer says"


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    quick, turns, ended = load_tokenizer(STORIES, EngineConfig()), 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not ended.is_set():
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    quick.encode("Once upon a time " * 100_000)
    ended.set()
    thread.join()
    assert turns > 100


def test_nothing_of_transformers_is_imported() -> None:
    code = """
import sys
from folovllm import LLM
llm = LLM(device="cpu", use_tqdm=False, milestone="m1", model_impl="native")
assert llm.generate("Once upon", use_tqdm=False)[0].outputs[0].text
assert "transformers" not in sys.modules, "transformers takes seconds"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_transformers_ignores_a_long_text(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The engine's own sentence says that it is too long."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = load_tokenizer(ASSETS / "stories-5m", EngineConfig(model="stories-5m"))
    assert len(full_tokenizer(tokenizer).encode("a b " * 9000)) > 16_384
    assert "longer than the specified maximum" not in caplog.text
