"""The tokenizer: byte-level BPE with 4,096 entries, digits one by one, ChatML; trained on stories and some English."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .documents import END, PARAGRAPHS, SEPARATOR, START, document

VOCAB_SIZE = 4096
SPECIAL_TOKENS = [SEPARATOR, START, END]  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def corpus(num_documents: int, seed: int) -> Iterator[str]:
    """Story documents without their markup, then the English text, often enough to earn entries of its own."""
    markup = re.compile(rf"{re.escape(START)}(?:system|user|assistant)\n|" + "|".join(map(re.escape, SPECIAL_TOKENS)))
    for index in range(num_documents):
        yield markup.sub("", "".join(text for text, _ in document(Random(seed * 2**32 + index))))
    yield from ("user\n", "assistant\n", "system\n")
    yield from PARAGRAPHS * 30


def train_tokenizer(num_documents: int = 60_000, seed: int = 1) -> Tokenizer:
    """The same tokenizer for the same arguments. Any text can be encoded: all 256 bytes are entries."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(num_documents, seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and the tokenizer_config.json that transformers reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": SEPARATOR,
        "unk_token": None,
        "additional_special_tokens": [START, END],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
