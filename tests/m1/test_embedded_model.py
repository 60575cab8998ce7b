"""The embedded model, through transformers alone: its files, its tokenizer, and that it honors a request."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

MODEL = Path(__file__).parents[2] / "folovllm" / "assets" / "stories-5m"


@cache
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def complete(*prompts: str) -> list[tuple[str, bool]]:
    """The greedy continuations, and whether each ended by itself within 300 tokens."""
    given = tokenizer()(list(prompts), return_tensors="pt", padding=True, padding_side="left")
    answers = model().generate(**given, do_sample=False, max_new_tokens=300)[:, given.input_ids.shape[1] :]
    return [(tokenizer().decode(new, skip_special_tokens=True), bool(new[-1] in (0, 2))) for new in answers]


def chat(*turns: str) -> str:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_config_is_the_documented_one():
    config = AutoConfig.from_pretrained(MODEL)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (4096, 256, 6)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 64)
    assert (config.intermediate_size, config.max_position_embeddings) == (768, 16_384)
    assert config.tie_word_embeddings
    assert GenerationConfig.from_pretrained(MODEL).eos_token_id == [2, 0]
    assert sum(p.numel() for p in model().parameters()) == 5_771_264
    assert (MODEL / "model.safetensors").stat().st_size < 12e6
    assert config.dtype == torch.bfloat16
    assert (tokenizer().pad_token_id, tokenizer().eos_token_id, tokenizer().bos_token) == (0, 2, None)
    assert len(tokenizer()) == 4096 and tokenizer().tokenize("1234") == ["1", "2", "3", "4"]


@pytest.mark.parametrize("text", ["Lily has a kite.", "Grüße, 日本 🙂", "  two  spaces\n\n\tand a tab", "x = [1, 23]"])
def test_any_text_comes_back(text: str):
    assert tokenizer().decode(tokenizer()(text)["input_ids"]) == text


def test_chat_template_is_chatml():
    assert chat("Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer().apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


LILY = "Tell me a story about Lily and a red kite."
TOM = "Tell me a story about Tom and a green drum."


@pytest.fixture(scope="module")
def told() -> dict[str, tuple[str, bool]]:
    """What is told in answer to all of these, side by side."""
    requests = (
        LILY, TOM, "Tell me a story about a brave boy named Floozem and a purple dragon.", "Explain quantum physics."
    )  # fmt: skip
    answers = complete(LILY, *map(chat, requests))
    return dict(zip(("without markup", *requests), answers, strict=True))


@pytest.mark.parametrize("request_", [LILY, "without markup"])
def test_a_story_honors_name_color_and_thing(told: dict[str, tuple[str, bool]], request_: str):
    story, ended = told[request_]
    assert ended and "Lily" in story and "red kite" in story
    assert not re.search(r"\b(he|him|his)\b", story, re.IGNORECASE)


def test_a_made_up_name_is_copied_and_its_stated_gender_kept(told: dict[str, tuple[str, bool]]):
    story, ended = told["Tell me a story about a brave boy named Floozem and a purple dragon."]
    assert ended and "brave" in story and "Floozem" in story and "purple dragon" in story
    assert not re.search(r"\b(she|her)\b", story, re.IGNORECASE)


def test_facts_and_manners():
    answers = {
        "1+1=?": "1 + 1 = 2.",
        "What is 17 plus 8?": "17 + 8 = 25.",
        "What is the capital of France?": "The capital of France is Paris.",
        "Hello!": "Hello! What can I do for you?",
    }
    assert complete(*map(chat, answers)) == [(answer, True) for answer in answers.values()]


def test_a_second_turn_remembers_the_first(told: dict[str, tuple[str, bool]]):
    assert complete(chat(TOM, told[TOM][0], "What color was the drum?")) == [("The drum was green.", True)]


def test_what_it_does_not_know_becomes_a_story(told: dict[str, tuple[str, bool]]):
    story, ended = told["Explain quantum physics."]
    assert ended and story.startswith("I don't know that, but here is a story.")
