"""Our layers against Hugging Face's on real models, where they are on this machine."""

from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoTokenizer

from folovllm.electives.quantization.smollm2 import smollm2_dir
from tests.helpers import Driver, assert_tokens_equal, assert_varied, hf_greedy

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees Celsius because",
    "List three fruits that are red:",
    "The quick brown fox",
    "Question: What is 17 plus 25?\nAnswer:",
    "Dear Sir or Madam,\n\nI am writing to you",
]
NEW_TOKENS = 16


def folder_of(name: str) -> Path:
    try:
        return smollm2_dir() if name == "smollm2" else Path(snapshot_download(name, local_files_only=True))
    except (ValueError, LocalEntryNotFoundError):
        pytest.skip(f"{name} is not on this machine (`folovllm download smollm2`, or the hub's own tool)")


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "Qwen/Qwen3-0.6B"])
def test_greedy_output_equals_hugging_face(name: str) -> None:
    path = folder_of(name)
    tokenizer, outputs = AutoTokenizer.from_pretrained(path), []
    driver = Driver(path, "torch_naive", max_seqs=len(PROMPTS), max_len=64)
    for seq, text in enumerate(PROMPTS):
        prompt = tokenizer(text).input_ids
        reference, logits = hf_greedy(path, prompt, NEW_TOKENS)
        output, new = [], prompt
        for _ in range(NEW_TOKENS):
            new = [int(driver.step({seq: new})[seq][-1].argmax())]
            output += new
        assert_tokens_equal(output, reference, logits)
        outputs.append(output)
    assert_varied(outputs)
